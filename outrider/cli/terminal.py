"""Output where not every character can be shown, or nothing more written: no tracebacks."""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import os
import struct
import sys
from collections.abc import Iterator

_ESCAPE = "outrider.escape"
_ESCAPED_ASCII = "escaped_ascii"


def adapt_streams() -> None:
    """Make this process's standard streams take any text, and any bytes, from now on."""
    _register()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = _ESCAPED_ASCII if _is_ascii(stream) else None
            stream.reconfigure(encoding=encoding, errors=_ESCAPE)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # What is no text is refused later, with words.
        encoding = "utf-8" if _is_ascii(sys.stdin) else None
        sys.stdin.reconfigure(encoding=encoding, errors="surrogateescape")


@contextlib.contextmanager
def full_disks_told() -> Iterator[None]:
    """Exit with 1 and one line where standard output takes no more."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # as it is where it was closed before the start
                sys.stdout.flush()
    except OSError as error:
        # What is buffered would fail once more at the end of the process.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process is there
        with contextlib.suppress(OSError):
            print(f"Error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


@functools.cache
def _register() -> None:
    codecs.register_error(_ESCAPE, _escape)
    codecs.register(_find_codec)


def _is_ascii(stream: io.TextIOWrapper) -> bool:
    return codecs.lookup(stream.encoding).name == "ascii"


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""The characters as \uXXXX, which JSON reads too."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    escaped = "".join(f"\\u{unit:04x}" for (unit,) in struct.iter_unpack(">H", units))
    return escaped, error.end


def _find_codec(name: str) -> codecs.CodecInfo | None:
    """ASCII by another name: click takes a stream of that one for a mistake, and writes UTF-8."""
    if name != _ESCAPED_ASCII:
        return None
    known = codecs.lookup("ascii")
    return codecs.CodecInfo(
        known.encode,
        known.decode,
        incrementalencoder=known.incrementalencoder,
        incrementaldecoder=known.incrementaldecoder,
        name=_ESCAPED_ASCII,
    )

"""The file of API keys, read at the start and looked at again and again while the gateway runs."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path

import structlog

from gateway.keys import MAX_FILE_BYTES, KeyFileError, Keys, parse_keys
from outrider.serving.settings import SettingsError

log = structlog.get_logger(__name__)

_POLL_S = 0.4
"""A change counts when two looks have seen it: within a second."""
_FAILED_S = 10.0


def read_key_file(path: Path) -> bytes:
    """Its bytes, of one that is too large a part. Raises KeyFileError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for its writer
            raise KeyFileError("not a regular file")
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(error.strerror or type(error).__name__) from error


class KeyFile:
    """Where a gateway has its keys from.

    The file is read whole at each look, so neither clocks nor inodes can hide a change: an edit in
    place counts as much as a rename over it or a symlink that points elsewhere. A change counts
    once two looks saw the same, because somebody may be in the middle of writing at the first.
    """

    def __init__(self, path: Path, poll_s: float = _POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s
        self._judged: bytes | str | None = None  # what was taken or refused last

    def load(self) -> Keys:
        """The keys at the start. Raises SettingsError."""
        try:
            self._judged = read_key_file(self._path)
            keys = parse_keys(self._judged)
        except KeyFileError as error:
            raise SettingsError(f"api_keys: {self._path}: {error}") from error
        log.info("api keys loaded", keys=len(keys))
        return keys

    async def follow(self, take: Callable[[Keys], None]) -> None:
        """After `load`, give `take` the keys of each new file, for as long as this runs.

        A file that cannot be used changes nothing, and one line is logged for it. What fails
        otherwise is logged and tried anew: a key that is removed must not stay good for ever.
        """
        before = self._judged
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                # On a thread: a folder that is on another machine may let us wait.
                now = await asyncio.to_thread(_look, self._path)
                if now == before != self._judged:
                    keys = await asyncio.to_thread(_judge, now)
                    take(keys)
                    self._judged = now
                    log.info("api keys loaded", keys=len(keys))
                before = now
            except KeyFileError as error:
                self._judged = now
                log.error("api keys stay as they were", file=str(self._path), error=str(error))
            except Exception as error:
                log.error("api keys cannot be followed", exc_info=error)
                await asyncio.sleep(_FAILED_S)


def _look(path: Path) -> bytes | str:
    """The file's content, or why there is none."""
    try:
        return read_key_file(path)
    except KeyFileError as error:
        return str(error)


def _judge(seen: bytes | str) -> Keys:
    """The keys in what `_look` saw. Raises KeyFileError."""
    if isinstance(seen, str):
        raise KeyFileError(seen)
    return parse_keys(seen)

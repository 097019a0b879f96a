"""`outrider keys`: make an API key, check and list the file of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gateway.key_file import read_key_file
from gateway.keys import LIMITS, NAME_RULE, KeyFileError, Keys, is_name, key_hash, parse_keys
from outrider.cli.config_file import toml_value
from outrider.text import one_line

_KEY_BYTES = 32  # 256 bits, which is why a plain hash of them can lie around
_HELP = {
    "priority": "Of its requests, which may only lower it.",
    "max_concurrent": "Most requests at once.",
    "requests_per_minute": "Most requests that begin in a minute.",
    "tokens_per_minute": "Most tokens in a minute, of prompts and answers together.",
    "max_tokens": "Most tokens that a request may ask for.",
}
_WIDE = 1000
_DEFAULT = "keys.toml"
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def keys() -> None:
    """API keys of a gateway, in a file that holds their hashes."""


def _limit_options(command: Any) -> Any:
    for name in reversed(LIMITS):
        low, high = LIMITS[name]
        kind = click.IntRange(low, high)
        option = click.option(f"--{name.replace('_', '-')}", type=kind, help=_HELP[name])
        command = option(command)
    return command


@keys.command("new", short_help="Make a key, add its hash to a file, print the key.")
@click.argument("name")
@click.option("--file", type=_FILE, default=_DEFAULT, show_default=True, help="Where to add it.")
@_limit_options
def new(name: str, file: Path, **limits: int | None) -> None:
    """Make a key, add its hash to the file as NAME, and print the key, this once.

    A running gateway takes the file up within a second. A new file can be read by its owner only;
    one that is there keeps its owner and who may read it.
    """
    if not is_name(name):
        raise click.BadParameter(f"must be {NAME_RULE}", param_hint="NAME")
    key = f"or-{secrets.token_urlsafe(_KEY_BYTES)}"
    fields: dict[str, str | int] = {"name": name, "sha256": key_hash(key).hex()}
    fields |= {limit: value for limit, value in limits.items() if value is not None}
    lines = [f"{field} = {toml_value(value)}\n" for field, value in fields.items()]
    with _errors(file):
        _replace(file, lambda content: _with_entry(content, name, "".join(lines)))
    click.echo(f"{name} is in {one_line(str(file))}; its key is shown only now:", err=True)
    click.echo(key)


@keys.command("check")
@click.argument("file", type=_FILE, default=_DEFAULT)
def check(file: Path) -> None:
    """Say whether a gateway would take FILE (keys.toml), and what is wrong if not."""
    with _errors(file):
        num_keys = len(_read(file))
    click.echo(f"{one_line(str(file))}: {num_keys} key{'' if num_keys == 1 else 's'}")


@keys.command("list")
@click.argument("file", type=_FILE, default=_DEFAULT)
def list_keys(file: Path) -> None:
    """The names in FILE (keys.toml) and the limits of each."""
    with _errors(file):
        found = _read(file)
    table = Table("name", *LIMITS)
    for key in found:
        limits = [getattr(key, limit) for limit in LIMITS]
        table.add_row(key.name, *("-" if limit is None else str(limit) for limit in limits))
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE  # what reads it wants whole names
    console.print(table)


@contextlib.contextmanager
def _errors(file: Path) -> Iterator[None]:
    try:
        yield
    except KeyFileError as error:
        raise click.ClickException(one_line(f"{file}: {error}")) from error
    except OSError as error:
        raise click.ClickException(one_line(f"{file}: {error.strerror}")) from error


def _read(file: Path) -> Keys:
    return parse_keys(read_key_file(file))


def _with_entry(content: bytes, name: str, entry: str) -> bytes:
    if any(key.name == name for key in parse_keys(content)):
        raise KeyFileError(f"has a key called {name} already")
    gap = "" if not content else "\n" if content.endswith(b"\n") else "\n\n"
    content += f"{gap}[[keys]]\n{entry}".encode()
    parse_keys(content)
    return content


def _replace(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Put the changed content in place of a file's at once, behind a symlink if it is one.

    Whoever else does so waits, so that no key is lost.
    """
    path = Path(os.path.realpath(file))
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = path.stat() if path.exists() else None
        content = change(read_key_file(path) if before else b"")
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with open(descriptor, "wb") as new_file:
                if before:
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                    os.fchmod(descriptor, before.st_mode & 0o777)
                new_file.write(content)
                new_file.flush()
                os.fsync(descriptor)
            os.replace(partial, path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)

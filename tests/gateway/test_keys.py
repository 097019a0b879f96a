"""API keys: what a file of them may say, the header that shows one, and files that change."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.key_file import KeyFile
from gateway.keys import ApiKey, KeyFileError, Keys, bearer_key, key_hash, parse_keys
from outrider.serving.errors import Unauthenticated
from outrider.serving.settings import SettingsError
from tests.support.gateways import until

KEY = "or-" + "k" * 43
HASH = hashlib.sha256(KEY.encode()).hexdigest()


def entry(name: str = "a", sha256: str = HASH, more: str = "") -> str:
    """One key's table."""
    return f'[[keys]]\nname = "{name}"\nsha256 = "{sha256}"\n{more}\n'


def entry_of(name: str) -> str:
    """A table whose key is its name."""
    return entry(name, hashlib.sha256(name.encode()).hexdigest())


def test_all_fields() -> None:
    """What is in the file is what a key may do; what is not is no limit."""
    limits = {
        "priority": -100,
        "max_concurrent": 4,
        "requests_per_minute": 60,
        "tokens_per_minute": 10**9,
        "max_tokens": 1,
    }
    more = "\n".join(f"{name} = {value}" for name, value in limits.items())
    first, second = parse_keys((entry("a.B_c-1@x", HASH.upper(), more) + entry_of("b")).encode())
    assert first == ApiKey("a.B_c-1@x", key_hash(KEY), **limits)
    assert second == ApiKey("b", key_hash("b"))


@pytest.mark.parametrize("content", [b"", b"# none yet\n", b"keys = []\n"])
def test_no_keys_are_a_file_too(content: bytes) -> None:
    """The last key can be removed: then nobody is let in."""
    assert parse_keys(content) == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[keys", "not TOML"),
        ("a = " + "[" * 10_000, "nested too deeply"),
        ("#" * 4_194_305, "larger than 4194304 bytes"),
        ("[[key]]\nname = 'a'", "unknown field key; there is only [[keys]]"),
        ("keys = 1", "keys must be a list of tables, [[keys]]"),
        ("[keys]\nname = 'a'", "keys must be a list of tables, [[keys]]"),
        ("keys = [1]", "entry 1: must be a table, [[keys]]"),
        (f"[[keys]]\nsha256 = '{HASH}'", "entry 1: name must be 1 to 32 letters"),
        (entry_of("a") + entry("two words"), "entry 2: name must be 1 to 32 letters"),
        (entry(""), "entry 1: name must be"),
        (entry("x" * 33), "entry 1: name must be"),
        (entry("-x"), "entry 1: name must be"),
        (entry("\u00e4"), "entry 1: name must be"),
        ("[[keys]]\nname = 'a'", "entry 1 (a): sha256 must be 64 hexadecimal digits"),
        (entry(sha256=HASH[1:]), "entry 1 (a): sha256 must be 64"),
        (entry(sha256="g" + HASH[1:]), "entry 1 (a): sha256 must be 64"),
        (entry(sha256=KEY), "entry 1 (a): sha256 must be 64"),
        (entry(more="tokens = 1"), "entry 1 (a): unknown field tokens; there are: name, sha256,"),
        (entry(more="priority = 101"), "priority must be a whole number from -100 to 100"),
        (entry(more="priority = -101"), "priority must be a whole number"),
        (entry(more="max_concurrent = 0"), "max_concurrent must be a whole number from 1 to"),
        (entry(more="max_concurrent = true"), "max_concurrent must be a whole number"),
        (entry(more="requests_per_minute = 0.5"), "requests_per_minute must be a whole number"),
        (entry(more="tokens_per_minute = '9'"), "tokens_per_minute must be a whole number"),
        (entry(more="max_tokens = 1000000001"), "max_tokens must be a whole number"),
        (entry_of("a") + entry("a"), "entry 2: name is that of entry 1 too"),
        (entry_of("x") + entry("a") + entry("b"), "entry 3: sha256 is that of entry 2 too"),
        (entry("a") + entry("b", HASH.upper()), "entry 2: sha256 is that of entry 1 too"),
    ],
)
def test_what_is_wrong_is_named(content: str, message: str) -> None:
    """The entry and the field, and never a key or a hash."""
    with pytest.raises(KeyFileError, match=re.escape(message)) as caught:
        parse_keys(content.encode())
    assert HASH[1:20].lower() not in str(caught.value).lower()
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("secret", [KEY, HASH])
@pytest.mark.parametrize(
    "content",
    [
        "SECRET",
        "SECRET = 1",
        "'SECRET' = 1",
        "[SECRET]\n[SECRET]",
        "[[keys]]\nname = 'SECRET'",
        "[[keys]]\nname = 'a'\nSECRET = 1",
        "[[keys]]\nname = 'a'\nsha256 = 'xSECRET'",
    ],
)
def test_secrets_in_wrong_places_are_not_shown(secret: str, content: str) -> None:
    """A key that was pasted where a name or a table belongs does not come out in the message."""
    with pytest.raises(KeyFileError) as caught:
        parse_keys(content.replace("SECRET", secret).encode())
    assert secret not in str(caught.value)


def test_a_key_that_is_shown_has_no_hash() -> None:
    """Whoever logs one by mistake has not logged what it is known by."""
    assert repr(ApiKey("a", key_hash(KEY), max_tokens=1)) == (
        "ApiKey(name='a', priority=None, max_concurrent=None, requests_per_minute=None, "
        "tokens_per_minute=None, max_tokens=1)"
    )


def test_bytes_that_are_no_text() -> None:
    """They are told in words."""
    with pytest.raises(KeyFileError, match="not UTF-8"):
        parse_keys(b"\xff")


def test_salts() -> None:
    """Each key has its own, always the same one, which is no part of its hash."""
    one, other = ApiKey("a", key_hash("a")), ApiKey("a", key_hash("b"))
    assert one.cache_salt == ApiKey("renamed", key_hash("a"), max_tokens=1).cache_salt
    assert one.cache_salt != other.cache_salt
    assert len(one.cache_salt) == 16
    assert one.cache_salt not in one.sha256
    assert one.cache_salt.hex() == "c47c02e95f21532cd51e75b213ba55fc"  # as it stays


@pytest.mark.parametrize(
    "header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER   {KEY}", f" \tBearer\t{KEY} "]
)
def test_a_key_in_its_header(header: str) -> None:
    """The scheme in any case, with any blanks."""
    assert bearer_key(header) == KEY


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "no API key was sent"),
        ("", "no API key was sent"),
        ("  \t", "no API key was sent"),
        (KEY, "the header's scheme is not Bearer"),
        (f"Basic {KEY}", "the header's scheme is not Bearer"),
        (f"Bearer{KEY}", "the header's scheme is not Bearer"),
        ("Bearer", "behind Bearer there must be one key"),
        ("Bearer  ", "behind Bearer there must be one key"),
        (f"Bearer {KEY} {KEY}", "behind Bearer there must be one key"),
        (f"Bearer x\x00{KEY}", "behind Bearer there must be one key"),
        (f"Bearer {KEY}\u00e9", "the header has characters that are not ASCII"),
        (f"Bearer\u00a0{KEY}", "the header has characters that are not ASCII"),
        (f"Bearer {KEY}{'x' * 10**6}", "the header has more than 1024 characters"),
        (" " * 10**6 + f"Bearer {KEY}", "the header has more than 1024 characters"),
    ],
)
def test_headers_without_a_key(header: str | None, reason: str) -> None:
    """The message says what is wrong and what to send, and nothing of what was sent."""
    with pytest.raises(Unauthenticated) as caught:
        bearer_key(header)
    assert str(caught.value) == f"{reason}; send the header `authorization: Bearer KEY`"


@given(st.one_of(st.text(max_size=40), st.text(max_size=40).map(lambda text: f"Bearer {text}")))
def test_any_header(header: str) -> None:
    """It is a key of printable ASCII, or Unauthenticated: never another error."""
    with contextlib.suppress(Unauthenticated):
        key = bearer_key(header)
        assert key in header and key.isprintable() and " " not in key
        assert len(key_hash(key)) == 32


def test_a_file_at_the_start(tmp_path: Path) -> None:
    """What cannot be used ends the start with the setting, the file and the reason."""
    path = tmp_path / "keys.toml"
    for make, reason in (
        (lambda: None, "No such file or directory"),
        (path.mkdir, "not a regular file"),
        (lambda: path.rmdir() or os.mkfifo(path), "not a regular file"),
        (lambda: path.unlink() or path.write_text("x"), "not TOML"),
    ):
        make()
        with pytest.raises(SettingsError, match=re.escape(f"api_keys: {path}: {reason}")):
            KeyFile(path).load()
    path.write_text(entry())
    assert [key.name for key in KeyFile(path).load()] == ["a"]


@contextlib.asynccontextmanager
async def following(path: Path, take: Callable[[Keys], None]) -> AsyncIterator[None]:
    """A loaded file that is looked at a hundred times a second."""
    file = KeyFile(path, poll_s=0.01)
    file.load()
    task = asyncio.create_task(file.follow(take))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()


def edit(path: Path, content: str) -> None:
    """Write into the file that is there."""
    path.write_text(content)


def rename_over(path: Path, content: str) -> None:
    """Put a new file in its place."""
    other = path.with_name("other")
    other.write_text(content)
    other.replace(path)


def swap_symlinks(path: Path, content: str) -> None:
    """As Kubernetes does with a secret: the folder behind a link becomes another one."""
    data = path.parent / "..data"
    folder = path.parent / f"..{os.urandom(4).hex()}"
    folder.mkdir()
    (folder / path.name).write_text(content)
    link = path.parent / "..data_tmp"
    link.symlink_to(folder.name)
    link.replace(data)
    if not path.is_symlink():
        path.unlink()
        path.symlink_to(f"..data/{path.name}")


@pytest.mark.parametrize("change", [edit, rename_over, swap_symlinks])
async def test_changes_are_taken(change: Callable[[Path, str], None], tmp_path: Path) -> None:
    """However a file is changed, its keys count soon after, with one line for each change."""
    path = tmp_path / "keys.toml"
    path.write_text(entry_of("a"))
    change(path, entry_of("a"))
    taken: list[list[str]] = []
    with capture_logs() as lines:
        async with following(path, lambda keys: taken.append([key.name for key in keys])):
            for names in (["b"], ["b", "c"], [], ["c"]):
                change(path, "".join(entry_of(name) for name in names))
                await until(lambda names=names: taken[-1:] == [names])
    assert taken == [["b"], ["b", "c"], [], ["c"]]
    assert [(line["event"], line["keys"]) for line in lines] == [
        ("api keys loaded", num_keys) for num_keys in (1, 1, 2, 0, 1)
    ]


async def test_an_equal_size_and_time_hide_nothing(tmp_path: Path) -> None:
    """A file is taken by what it says, not by what its folder says of it."""
    path = tmp_path / "keys.toml"
    path.write_text(entry_of("a"))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    taken: list[Keys] = []
    async with following(path, taken.append):
        path.write_text(entry_of("b"))
        os.utime(path, ns=times)
        await until(lambda: len(taken) == 1)
    assert taken[0][0].name == "b"


async def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    """One line for each bad file, however long it stays; a good one counts again."""
    path = tmp_path / "keys.toml"
    path.write_text(entry())
    taken: list[Keys] = []
    with capture_logs() as lines:
        async with following(path, taken.append):
            for number, bad in enumerate((entry(more="max_tokens = 0"), "[[keys", None), 1):
                if bad is None:
                    path.unlink()
                else:
                    path.write_text(bad)
                await until(lambda number=number: len(lines) == 1 + number)
                await asyncio.sleep(0.1)
            assert taken == []
            path.write_text(entry())
            await until(lambda: len(taken) == 1)
    wrong = [line["error"] for line in lines if line["event"] == "api keys stay as they were"]
    assert len(lines) == 5
    assert "entry 1 (a): max_tokens must be" in wrong[0]
    assert wrong[1].startswith("not TOML")
    assert wrong[2] == "No such file or directory"
    assert not any(HASH in str(line) for line in lines)


async def test_what_fails_unforeseen_is_told(tmp_path: Path) -> None:
    """The keys are followed on, and the log has the reason why some were not taken."""
    path = tmp_path / "keys.toml"
    path.write_text(entry_of("a"))

    def fail(keys: Keys) -> None:
        raise RuntimeError("out of threads")

    with capture_logs() as lines:
        async with following(path, fail):
            path.write_text(entry_of("b"))
            await until(lambda: len(lines) == 2)
    assert lines[1]["event"] == "api keys cannot be followed"

"""The pool's size: every way to ask for it, and what cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.engine.memory import DoesNotFit, PoolSize, free_host_bytes

FREE = 10_000


@pytest.mark.parametrize(
    ("size", "num_blocks"),
    [
        (PoolSize(tokens=160), 10),
        (PoolSize(tokens=175), 10),
        (PoolSize(blocks=7), 7),
        (PoolSize(bytes=999), 9),
        (PoolSize(fraction=0.5), 50),
        (PoolSize(tokens=1600), 100),
    ],
)
def test_each_way_to_ask(size: PoolSize, num_blocks: int) -> None:
    """Blocks of 16 tokens and 100 bytes; parts of a block do not count."""
    assert size.num_blocks(100, 16, FREE) == num_blocks


def test_nothing_asked_gives_the_default() -> None:
    """16,384 tokens."""
    assert PoolSize().num_blocks(1, 16, FREE) == 1024


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (PoolSize(tokens=160, blocks=3), "more than once: kv_tokens 160 and kv_blocks 3"),
        (PoolSize(bytes=160, fraction=0.5), "more than once: kv_bytes 160 and kv_fraction 0.5"),
        (PoolSize(tokens=15), "kv_tokens 15 is less than one block: 16 tokens, 100 bytes"),
        (PoolSize(bytes=99), "kv_bytes 99 is less than one block"),
        (PoolSize(blocks=101), "kv_blocks 101 needs 0 MiB for 1616 tokens, 0 MiB are free"),
        (PoolSize(), "kv_tokens, by default 16384, needs"),
    ],
)
def test_what_cannot_be_had_is_said(size: PoolSize, said: str) -> None:
    """At start, not when the memory runs out; by the name of the setting."""
    with pytest.raises(DoesNotFit, match=said):
        size.num_blocks(100, 16, FREE)


def test_free_memory_of_this_machine() -> None:
    """Something, and not the number that stands for not knowing."""
    assert 0 < free_host_bytes() < 2**50


@pytest.mark.parametrize(
    ("limit", "free"),
    [
        ("max", 8000 * 1024),
        ("90000000", 8000 * 1024),
        ("5000000", 5000000 - (4000000 - 2000000)),
        ("1000000", 0),
    ],
    ids=["no limit", "more than the machine has", "pages of files are free", "nothing left"],
)
def test_free_memory_of_a_container(tmp_path: Path, limit: str, free: int) -> None:
    """The least of machine and limit; what was only read from files does not count as used."""
    (tmp_path / "meminfo").write_text("MemTotal: 16000 kB\nMemAvailable: 8000 kB\nHugePages: 0\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 1900000\nfile 2100000\nshmem 100000\ninactive_file 1500000\nactive_file 500000\n"
    )
    assert free_host_bytes(tmp_path, tmp_path) == free

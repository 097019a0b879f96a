"""How many blocks a paged cache gets: from tokens, blocks, bytes, or a share of free memory.

Knows sizes, not tensors. The answer is known, and said, before anything is served.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.config import ModelConfig
from outrider_kernels.kv_layout import apart_row_bytes, int8_row_bytes

DEFAULT_TOKENS = 16384
KV_BYTES = {"float32": 4, "bfloat16": 2}
"""Of a number in the cache, where it is not rounded to 8 bits."""


class DoesNotFit(ValueError):
    """The pool would not hold a single sequence, or not fit into memory."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What was asked for; at most one is set, and none means DEFAULT_TOKENS.

    In settings and in errors each is called kv_ and its name here.
    """

    tokens: int = 0
    blocks: int = 0
    bytes: int = 0
    fraction: float = 0.0
    """Of the memory that is free once the model is loaded."""

    def num_blocks(self, block_bytes: int, block_size: int, free_bytes: int) -> int:
        """Blocks of `block_size` tokens. Raises DoesNotFit, naming what was asked for."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        asked = [f"kv_{name} {value}" for name, value in given.items() if value]
        if len(asked) > 1:
            raise DoesNotFit(f"the pool's size is set more than once: {' and '.join(asked)}")
        if self.blocks:
            count = self.blocks
        elif self.bytes:
            count = self.bytes // block_bytes
        elif self.fraction:
            count = int(free_bytes * self.fraction) // block_bytes
        else:
            count = (self.tokens or DEFAULT_TOKENS) // block_size
        wanted = asked[0] if asked else f"kv_tokens, by default {DEFAULT_TOKENS},"
        if count < 1:
            raise DoesNotFit(
                f"{wanted} is less than one block: {block_size} tokens, {block_bytes} bytes"
            )
        if count * block_bytes > free_bytes:
            raise DoesNotFit(
                f"{wanted} needs {count * block_bytes / 2**20:.0f} MiB for {count * block_size} "
                f"tokens, {free_bytes / 2**20:.0f} MiB are free"
            )
        return count


def kv_row_bytes(head_dim: int, kv_dtype: str, scales_apart: bool) -> int:
    """Bytes of one token's key, or value, of one KV head, with its scales.

    kv_dtype is one of KV_BYTES, "int8" or "e4m3"; scales_apart as `Ops` has it.
    """
    if kv_dtype in KV_BYTES:
        return head_dim * KV_BYTES[kv_dtype]
    return apart_row_bytes(head_dim) if scales_apart else int8_row_bytes(head_dim)


def block_bytes(config: ModelConfig, block_size: int, kv_dtype: str, scales_apart: bool) -> int:
    """Bytes of one block: keys and values of every layer."""
    row_bytes = kv_row_bytes(config.head_dim, kv_dtype, scales_apart)
    return 2 * config.num_layers * config.num_kv_heads * row_bytes * block_size


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process can still use: what the machine has, or the container's limit.

    Pages of files count as free: the kernel gives them up, and reading a model fills memory with
    them.
    """
    available = _numbers(proc / "meminfo").get("MemAvailable:", 2**53) * 1024
    limit, used = _read_int(cgroup / "memory.max"), _read_int(cgroup / "memory.current")
    if limit is not None and used is not None:
        pages = _numbers(cgroup / "memory.stat")
        used -= pages.get("active_file", 0) + pages.get("inactive_file", 0)
        available = min(available, max(0, limit - used))
    return available


def _numbers(path: Path) -> dict[str, int]:
    """Of a file with a name and a number in each line; empty if there is no file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def _read_int(path: Path) -> int | None:
    """The number in a file; None if there is no file or no limit in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

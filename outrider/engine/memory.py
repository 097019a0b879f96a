"""How many blocks a paged cache gets: from tokens, blocks, bytes, or a share of free memory.

Knows sizes, not tensors. The answer is known, and said, before anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.engine.config import ModelConfig

DEFAULT_TOKENS = 16384


class DoesNotFit(ValueError):
    """The pool would not hold a single sequence, or not fit into memory."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What was asked for; at most one is set, and none means DEFAULT_TOKENS."""

    tokens: int = 0
    blocks: int = 0
    num_bytes: int = 0
    fraction: float = 0.0
    """Of the memory that is free once the model is loaded."""

    def num_blocks(self, block_bytes: int, block_size: int, free_bytes: int) -> int:
        """Blocks of `block_size` tokens. Raises DoesNotFit, naming what was asked for."""
        asked = [name for name in ("tokens", "blocks", "num_bytes", "fraction")
                 if getattr(self, name)]  # fmt: skip
        if len(asked) > 1:
            raise DoesNotFit(f"the pool's size is set more than once: {' and '.join(asked)}")
        if self.blocks:
            count = self.blocks
        elif self.num_bytes:
            count = self.num_bytes // block_bytes
        elif self.fraction:
            count = int(free_bytes * self.fraction) // block_bytes
        else:
            count = (self.tokens or DEFAULT_TOKENS) // block_size
        if count < 1:
            raise DoesNotFit(f"the pool would not hold one block of {block_bytes} bytes")
        if count * block_bytes > free_bytes:
            raise DoesNotFit(
                f"a pool of {count * block_size} tokens needs {count * block_bytes / 2**20:.0f} "
                f"MiB, {free_bytes / 2**20:.0f} MiB are free"
            )
        return count


def block_bytes(config: ModelConfig, block_size: int, element_bytes: int) -> int:
    """Bytes of one block: keys and values of every layer."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * element_bytes
    return per_token * block_size


def free_host_bytes() -> int:
    """Memory that this process can still use: what the machine has, or the container's limit."""
    available = _meminfo("MemAvailable") or 2**63
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    used = _read_int(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _read_int(path: Path) -> int | None:
    """The number in a file; None if there is no file or no limit in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

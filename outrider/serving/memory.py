"""Memory that a process has freed, back to the machine."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_memory() -> None:
    """Where the C library can do so; it keeps what it has freed for later, which may never come.

    After SmolLM2's tokenizer was read that is 34 of 131 MB (see docs/LOG.md).
    """
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)

"""Captured work: launched once, replayed as a whole. Of captured steps all that names CUDA is here.

On a CPU, where Triton's interpreter computes, nothing can be captured: the work is called again, on
the same memory, so that tests see what a graph would do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Work = Callable[[], None]


class Capture:
    """Captures for one device; whatever is captured shares memory for what it computes on the way.

    So the work may keep nothing but what it writes into tensors that were there before.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Work) -> Work:
        """What does the work again, in one launch; on a GPU the work is done twice meanwhile."""
        if not self._is_cuda:
            return work
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and makes libraries ready, which a capture must not see
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may ask for free memory meanwhile, which is no part of the work.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


class HostBuffer:
    """int32 numbers on the host that a device copies from while the host goes on."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._tensor = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self.numbers = self._tensor.numpy()
        self._sent = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, to: torch.Tensor, count: int) -> None:
        """Copy the first numbers to the device, behind what it has been told to do so far."""
        to[:count].copy_(self._tensor[:count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Until they are copied, and may change; after a step whose tokens are known, at once."""
        if self._sent is not None:
            self._sent.synchronize()


def reserved_bytes(device: torch.device) -> int:
    """Memory of the device that torch has taken."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

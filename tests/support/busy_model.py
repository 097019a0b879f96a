"""A process that runs decode steps of a model for as long as it is told, as a busy service would.

with BusyModel(folder, threads=2, spin_us=50) as model:
    model.begin(1.0)
    steps = model.end()
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

CONTEXT = 128


class BusyModel:
    """The parent's end of it."""

    def __init__(self, folder: Path, *, threads: int, spin_us: int) -> None:
        words = [sys.executable, "-m", __name__, str(folder), str(threads), str(spin_us)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> BusyModel:
        """Returns once it is warm."""
        assert self._read() == "ready"
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0 or error[0] is not None

    def begin(self, seconds: float) -> None:
        """It works for so long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def end(self) -> float:
        """Waits for that; the steps that it ran a second."""
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def work(folder: str, threads: int, spin_us: int) -> None:
    """The process itself."""
    from outrider.engine.numerics import prepare_cpu

    prepare_cpu(threads)
    from outrider.engine.batch import Batch, BatchItem
    from outrider.engine.block_pool import BLOCK_SIZE
    from outrider.engine.model import LlamaModel
    from outrider.engine.runner import Runner

    model = LlamaModel.load(folder, "int8")
    model.set_spin(spin_us)
    blocks = list(range(CONTEXT // BLOCK_SIZE))
    runner = Runner(model, len(blocks))
    batch = Batch([BatchItem([7], CONTEXT - 1, blocks, 1)])
    runner.forward(batch)
    print("ready", flush=True)
    for line in sys.stdin:
        begin_s, steps = time.monotonic(), 0
        while time.monotonic() - begin_s < float(line):
            runner.forward(batch)
            steps += 1
        print(steps / (time.monotonic() - begin_s), flush=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

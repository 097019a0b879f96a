"""Does a row of a float32 matrix product depend on how many rows there are? One table.

`python bench/row_invariance.py` runs every shape of SmolLM2-135M in a fresh process for each thread
count, with MKL as it comes and with MKL_CBWR=AUTO,STRICT, because MKL reads the variable once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

# (columns in, columns out) of SmolLM2-135M's matrices
SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576), (576, 49152))
ROW_COUNTS = (1, 2, 4, 7, 8, 9, 15, 16, 17, 31, 32, 64, 128, 256, 512)
NUM_REFERENCE_ROWS = 512
TIMED_ROWS = 8
REPEATS = 20


def measure(num_threads: int) -> dict[str, object]:
    """Row counts whose rows differ from those of the 512-row product, and a time."""
    import torch
    from torch.nn.functional import linear

    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    differing: set[int] = set()
    seconds = 0.0
    for columns_in, columns_out in SHAPES:
        weight = torch.randn(columns_out, columns_in)
        rows = torch.randn(NUM_REFERENCE_ROWS, columns_in)
        whole = linear(rows, weight)
        for count in ROW_COUNTS:
            for first in (0, NUM_REFERENCE_ROWS - count):
                part = linear(rows[first : first + count], weight)
                if not torch.equal(part, whole[first : first + count]):
                    differing.add(count)
        began = time.perf_counter()
        for _ in range(REPEATS):
            linear(rows[:TIMED_ROWS], weight)
        seconds += (time.perf_counter() - began) / REPEATS
    return {"differing": sorted(differing), "ms": round(seconds * 1e3, 2)}


def main() -> None:
    """Print the table."""
    import torch

    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'MKL_CBWR':<14}threads  ms for {TIMED_ROWS} rows  row counts that differ")
    for setting in ("", "AUTO,STRICT"):
        for num_threads in (1, 2):
            environment = {**os.environ, "MKL_CBWR": setting}
            if not setting:
                del environment["MKL_CBWR"]
            command = [sys.executable, __file__, str(num_threads)]
            done = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True, timeout=300
            )
            found = json.loads(done.stdout)
            differing = " ".join(map(str, found["differing"])) or "none"
            print(f"{setting or '(unset)':<14}{num_threads:<9}{found['ms']:<15}{differing}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]))))
    else:
        main()

"""Choosing a token from a row of logits: microseconds by vocabulary and settings, on one thread.

    python -m bench.choosing --runs 200

Through `outrider_kernels.native_sampling`, Python's part of a call included. Rows are such as
models give, logits that fall as -1.6 log(rank) plus normal noise, and flatter ones, normal with a
spread of 3, where thousands of ids could win. The least of many runs, over eight rows in turn. The
last line is one JSON object: microseconds by vocabulary, kind of rows and settings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.params import SamplingParams

if TYPE_CHECKING:
    import torch

VOCABULARIES = (49_152, 152_000)
KINDS = ("models", "normal")
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(top_k=50),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.05),
}
_NUM_ROWS = 8


def rows_of(kind: str, num_ids: int) -> torch.Tensor:
    """float32 [_NUM_ROWS, num_ids], always the same."""
    import torch

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_NUM_ROWS, num_ids, generator=generator)
    if kind == "normal":
        return 3 * noise
    ranks = [torch.randperm(num_ids, generator=generator) for _ in range(_NUM_ROWS)]
    return noise - 1.6 * torch.stack(ranks).add(1).log()


def least_us(rows: torch.Tensor, params: SamplingParams, runs: int) -> float:
    """Microseconds of one choice."""
    from outrider_kernels.choice import Choice
    from outrider_kernels.native_library import load_library
    from outrider_kernels.native_sampling import choose

    library, num_ids = load_library(), rows.shape[1]
    least = float("inf")
    for run in range(runs):
        filters = (params.temperature, params.top_k, params.top_p, params.min_p)
        choice = Choice(rows, num_ids, run, (), params.seed, *filters, first=run % _NUM_ROWS)
        began = time.perf_counter()
        choose(library, [choice])
        least = min(least, time.perf_counter() - began)
    return 1e6 * least


def measure(
    runs: int, vocabularies: Sequence[int] = VOCABULARIES
) -> dict[str, dict[str, dict[str, float]]]:
    """By vocabulary, kind of rows and settings."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for num_ids in vocabularies:
        for kind in KINDS:
            rows = rows_of(kind, num_ids)
            found.setdefault(str(num_ids), {})[kind] = {
                name: round(least_us(rows, params, runs), 1) for name, params in SETTINGS.items()
            }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="of each, of which the least counts")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    found = measure(options.runs)
    print("vocabulary  rows    ", *(f"{name:>12}" for name in SETTINGS))
    for num_ids, by_kind in found.items():
        for kind, times in by_kind.items():
            print(f"{num_ids:>10}  {kind:8}", *(f"{us:12.1f}" for us in times.values()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

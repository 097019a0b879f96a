"""All that only a GPU can show, in one go of a few minutes; the last line is JSON.

    python -m bench.gpu_check

Every kernel against plain torch on the CPU; SmolLM2 with drafts and without, token by token (random
weights where the real ones are not in the cache), and with captured graphs and without, step by
step; the steps of a random model with 8 thousand million weights, with graphs and without, beside
what the memory's speed allows. Exit status: 0, all right; 1, something is wrong, and the JSON says
what; 2, there is no GPU that could be asked.

Nothing is downloaded, and nothing is needed but torch, Triton and numpy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

NO_GPU = 2
PRECISIONS = (
    ("bfloat16", "auto"),
    ("float32", "auto"),
    ("int8", "auto"),
    ("int4", "auto"),
    ("bfloat16", "int8"),
    ("bfloat16", "e4m3"),
)
"""dtype and kv_dtype of a model with drafts and without."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    import torch

    from outrider_kernels.triton_ops.limits import why_not_on

    reason = why_not_on(torch.device(options.device))
    if reason or not torch.cuda.is_available():
        print(f"no GPU to check: {reason or 'no CUDA device is found'}", file=sys.stderr)
        return NO_GPU
    report = run(options.device)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


def run(device: str) -> dict[str, Any]:
    """All parts, and what they found."""
    import torch
    import triton

    from bench.gpu_graphs import check_graphs
    from bench.gpu_kernels import check_kernels
    from bench.gpu_models import CONFIG_8B, random_model, small_model
    from bench.gpu_same_output import check_same_output
    from bench.gpu_speed import check_speed, read_gb_s
    from outrider.engine.device import parse_device

    began, place = time.monotonic(), parse_device(device)
    torch.cuda.set_device(place)  # where Triton's kernels start, wherever their tensors are
    major, minor = torch.cuda.get_device_capability(place)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(place),
        "capability": f"{major}.{minor}",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    checks = check_kernels(place)
    report["kernels"] = len(checks)
    report["wrong_kernels"] = {check.name: check.error for check in checks if not check.ok}
    _say(began, f"{len(checks)} checks of kernels, {len(report['wrong_kernels'])} wrong")
    ok = not report["wrong_kernels"]
    for dtype, kv_dtype in PRECISIONS:
        model, is_real = small_model(dtype, device, "triton", kv_dtype)
        found = check_same_output(model)
        report[f"same_output_{dtype}_{kv_dtype}"] = {"real_weights": is_real, **found}
        ok &= not any(each["differing"] for each in found.values())
        _say(began, f"with and without drafts in {dtype}, cache {kv_dtype}: {found}")
        graphs = report[f"graphs_{dtype}_{kv_dtype}"] = check_graphs(model)
        ok &= graphs["replayed"] == graphs["steps"] and not graphs["differing"]
        ok &= not graphs["waits"]
        _say(began, f"with and without graphs in {dtype}, cache {kv_dtype}: {graphs}")
    report["gb_s"] = round(read_gb_s(place))
    _say(began, f"{report['gb_s']} GB/s")
    for dtype in ("bfloat16", "int8", "int4"):
        large = random_model(CONFIG_8B, dtype, place, "triton")
        for name, graph_rows in (("eager", 0), ("graphs", 64)):
            steps = check_speed(large, report["gb_s"], graph_rows=graph_rows)
            report[f"steps_8b_{dtype}_{name}"] = steps
            _say(began, f"steps in {dtype}, {name}: {steps}")
        del large  # before the next one's weights are made
    return report | {"ok": ok, "seconds": round(time.monotonic() - began, 1)}


def _say(began: float, what: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

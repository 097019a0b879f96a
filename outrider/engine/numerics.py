"""What makes results repeatable on this machine, and the name of it.

Two things can change a bit: the kernel that a library picks for a shape, and the order in which
threads add. The first is pinned by an environment variable and by a `RowPlan`, which a probe checks
on the model's own weights at start; the second by operations whose sums stay inside one row.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.model import LlamaModel
    from outrider_kernels.linear import RowPlan, Weight

logger = logging.getLogger(__name__)

_PROBE_ROWS = 512
_PROBE_ROWS_OF_LARGE = 136
"""Of weights with more values than `_LARGE`: the whole probe is to take no second."""
_LARGE = 1 << 22
_PROBE_PARTS = (
    *((0, 8), (5, 13), (30, 67), (3, 20), (59, 67), (1, 34)),
    *((2, 66), (0, 128), (100, 357), (504, 512)),
)
"""Rows of a full product that are compared with products of their own."""
_TILE_ROWS = 32


def prepare_cpu(num_threads: int) -> None:
    """Pin the CPU's arithmetic. Call it once, before the first product.

    How threads wait is read when torch is loaded: the command line sets that before, and for
    programs of one's own this has to come before anything imports torch.
    """
    # Bit-equal products for any number of rows; read at the library's first call.
    os.environ["MKL_CBWR"] = "AUTO,STRICT"
    # Services share the cores: threads that spin while they wait would slow the others down.
    if "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        logger.warning("torch came before the CPU was prepared: its waiting threads may spin")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    # Read when a GPU's library is first used: sums in the same order in every run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(num_threads)


def choose_row_plan(weights: Iterable[Weight]) -> tuple[RowPlan, bool]:
    """The row plan under which these weights' products do not feel other rows; logs which.

    The second value is False if there is none: then equal requests may differ in other company.
    """
    from outrider_kernels.linear import RowPlan

    weights = list(weights)
    preferred = RowPlan()
    if all(is_row_invariant(weight, preferred) for weight in weights):
        logger.info("matrix products are row-invariant (%s)", preferred)
        return preferred, True
    fallback = RowPlan(tile_rows=_TILE_ROWS)
    if all(is_row_invariant(weight, fallback) for weight in weights):
        logger.warning("matrix products feel other rows here; using fixed tiles (%s)", fallback)
        return fallback, True
    logger.error(
        "matrix products feel other rows even in fixed tiles (%s): the same request may give "
        "other tokens in other company",
        fallback,
    )
    return fallback, False


def is_row_invariant(weight: Weight, plan: RowPlan) -> bool:
    """Whether rows come out the same bits alone and in company, at any place; weight [in, out]."""
    import torch

    from outrider_kernels.linear import linear

    generator = torch.Generator().manual_seed(0)
    # Float32 rows, so that rounding the result hides nothing.
    num_rows = _PROBE_ROWS_OF_LARGE if weight.shape.numel() > _LARGE else _PROBE_ROWS
    x = torch.randn(num_rows, weight.shape[0], generator=generator).to(weight.device)
    with torch.inference_mode():
        whole = linear(x, weight, None, plan)
        return all(
            torch.equal(linear(x[begin:end], weight, None, plan), whole[begin:end])
            for begin, end in _PROBE_PARTS
            if end <= num_rows
        )


def _cpu_model() -> str:
    """The processor's name as the kernel gives it; its architecture where it gives none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def numerics_id(model: LlamaModel) -> str:
    """A name for everything that the bits depend on; equal names promise equal tokens."""
    import numpy as np
    import torch

    from outrider_kernels.ops import KERNELS_VERSION
    from outrider_kernels.version import NOISE_VERSION

    rows = str(model.ops.row_plan or "any-rows")
    parts = [
        model.weights_fingerprint,
        model.precision,
        f"torch {torch.__version__}",
        # The libraries choose their code by the processor, not only by its instructions.
        f"cpu {_cpu_model()} {torch.backends.cpu.get_cpu_capability()}",
        f"numpy {np.__version__}",
        f"row-invariant {model.row_invariant}",
        f"mkl_cbwr {os.environ.get('MKL_CBWR', '')}",
        f"kernels {KERNELS_VERSION} {model.ops.name} {rows}",
        f"noise {NOISE_VERSION}",
    ]
    if model.kv_dtype in ("int8", "e4m3"):
        parts.append(f"kv {model.kv_dtype}")
    if model.device.type == "cuda":
        parts.append(f"cuda {torch.version.cuda} {torch.cuda.get_device_name(model.device)}")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return f"{model.precision}-{model.ops.name}-{rows}-{digest}"

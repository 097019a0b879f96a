"""The one place that picks an implementation for each operation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from outrider_kernels import native_attention, native_linear, native_rows, native_sampling
from outrider_kernels.attention import AttentionPlan, paged_attention, plan_attention
from outrider_kernels.choice import Choice
from outrider_kernels.elementwise import add_rms_norm, rms_norm, silu_mul
from outrider_kernels.kv_write import rotate_and_write
from outrider_kernels.linear import RowPlan, linear, lookup, pack
from outrider_kernels.model_shape import ModelShape
from outrider_kernels.native_attention import NativePlan
from outrider_kernels.native_build import Unavailable
from outrider_kernels.native_decoder import NativeDecoder
from outrider_kernels.native_library import NATIVE_VERSION, Library, load_library
from outrider_kernels.quantise import EITHER
from outrider_kernels.rounded_weight import Int4Weight, Int8Weight, pack_either
from outrider_kernels.triton_ops import gpu_weight
from outrider_kernels.triton_ops.configs import INVARIANT_SPLIT
from outrider_kernels.triton_ops.frames import Frames
from outrider_kernels.triton_ops.limits import (
    largest_tile,
    why_not_for,
    why_not_on,
    why_not_tried_on,
)
from outrider_kernels.triton_ops.work import Work

logger = logging.getLogger(__name__)

KERNELS_VERSION = 2
"""Raised with every change of a single bit of any result; part of the numerics id."""
KERNELS = ("auto", "torch", "triton")
"""What may be asked for: the fastest that the machine can have, plain torch, or Triton's, which
are a GPU's."""
TRITON_VERSION = 2
"""Raised with every change of a bit of what Triton's kernels compute."""
ROUNDINGS = (None, "int8", "int4", EITHER)
"""Of weights, and rows then to int8, but for Triton's int4; None: weights are what they are."""

Plan = AttentionPlan | NativePlan | Work
Weight = Any
"""What `pack` makes of a matrix: each implementation has its own layout."""


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of a decoder on one device: float32 sums, results in the inputs' dtype."""

    name: str
    """Another one for every implementation whose bits differ; part of the numerics id."""
    row_plan: RowPlan | None
    """Of products by a library whose kernel depends on the number of rows; None: rows are free."""
    pack: Callable[[torch.Tensor], Weight]
    """A matrix [out, in], as checkpoints hold it, once, for `linear`."""
    pack_table: Callable[[torch.Tensor], Weight]
    """The same for `lookup` as well; never rounded further than to int8."""
    linear: Callable[[torch.Tensor, Weight, torch.Tensor | None], torch.Tensor]
    lookup: Callable[[Weight, torch.Tensor], torch.Tensor]
    """Rows of the packed table [out, in] by number: of an embedding that is also the head."""
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    """Adds the first to the second, in place and rounded, and returns the sum's norm."""
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    rotate_and_write: Callable[..., torch.Tensor]
    plan_attention: Callable[..., Plan]
    paged_attention: Callable[..., torch.Tensor]
    """With a plan of this `plan_attention`."""
    scales_apart: bool = False
    """Where a cache in 8 bits has its scales: in tensors beside it (kv_scaled.py), which both of
    the above then take as their last arguments, keys' first; or in its rows (kv_rows.py)."""
    set_spin: Callable[[int], None] | None = None
    """Of threads of its own: how many microseconds one that waits for others keeps its core busy
    before it sleeps. None: there are only torch's, which are told before torch is loaded."""
    decoder: Callable[..., NativeDecoder] | None = None
    """Where a whole step is one call: made of a model's weights, in place of the other ones."""
    choose: Callable[[Sequence[Choice]], list[list[int]]] | None = None
    """The tokens of a step's rows; None: the engine's numpy, which chooses the same."""
    chooses_on_device: bool = False
    """Whether `choose` takes logits where the device leaves them, with their edits and what drafts
    were drawn from; else logits are the CPU's, rows are edited before, and there is no chance."""
    warm_choosing: Callable[[torch.Tensor], None] | None = None
    """Given logits, compiles what is compiled when `choose` first needs it."""
    frames: Callable[..., Frames] | None = None
    """Where steps can be captured: the memory that such a step reads."""
    first_steps: tuple[int, ...] = (0,)
    """Tokens behind which a step must stand once before all that is compiled on first use is."""

    @property
    def min_rows(self) -> int:
        """Rows that a step has at least; others are padding."""
        return 1 if self.row_plan is None else self.row_plan.min_rows

    def with_row_plan(self, row_plan: RowPlan) -> Ops:
        """The same with other products, where products have a plan."""
        return replace(self, row_plan=row_plan, linear=partial(linear, plan=row_plan))


def select_ops(
    device: torch.device,
    kernels: str = "auto",
    *,
    rounding: str | None = None,
    shape: ModelShape | None = None,
) -> Ops:
    """The operations for a device; logs which, and why. ValueError for what cannot be had.

    kernels is one of KERNELS, rounding one of ROUNDINGS. On a GPU "auto" is Triton's kernels where
    they are known to fit the chip and the model's shape, and else the CPU's plain torch: right, and
    far from what the device could do. A cache in e4m3 is Triton's alone: then "auto" insists on it.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no operations for device {device.type!r}, only for 'cpu' and 'cuda'")
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be {' or '.join(KERNELS)}, got {kernels!r}")
    wanted = "Triton's kernels"
    if shape is not None and shape.kv_dtype == torch.float8_e4m3fn:
        if kernels == "torch":
            raise ValueError("a cache in e4m3 needs Triton's kernels, not plain torch")
        kernels, wanted = "triton", "a cache in e4m3 needs Triton's kernels, which"
    if kernels == "torch":
        return _torch_ops(device, rounding, "as asked for")
    if kernels == "triton" or device.type == "cuda":
        reason = why_not_on(device) or why_not_for(shape)
        if kernels == "triton" and reason:
            raise ValueError(f"{wanted} cannot be used: {reason}")
        if device.type == "cuda":
            untried = reason or why_not_tried_on(device)
            if kernels == "auto" and untried:
                return _torch_ops(device, rounding, untried, logging.WARNING)
            if untried:
                logger.warning("Triton's kernels may fail here: %s", untried)
        assert shape is not None
        return _triton_ops(device, rounding, shape)
    try:
        return native_ops(load_library(), rounding=rounding)
    except Unavailable as reason:
        return _torch_ops(device, rounding, str(reason), logging.WARNING)


_TORCH_PACKS: dict[str | None, Callable[[torch.Tensor], Weight]] = {
    None: pack,
    "int8": Int8Weight.pack,
    "int4": Int4Weight.pack,
    EITHER: pack_either,
}


def _torch_ops(
    device: torch.device, rounding: str | None, reason: str, level: int = logging.INFO
) -> Ops:
    logger.log(level, "operations are plain torch (%s-torch): %s", device.type, reason)
    return Ops(
        name=f"{device.type}-torch",
        row_plan=RowPlan(),
        pack=_TORCH_PACKS[rounding],
        pack_table=Int8Weight.pack if rounding else pack,
        linear=partial(linear, plan=RowPlan()),
        lookup=lookup,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
        rotate_and_write=rotate_and_write,
        plan_attention=plan_attention,
        paged_attention=paged_attention,
    )


_TRITON_PACKS: dict[str | None, Callable[[torch.Tensor], Weight]] = {
    None: gpu_weight.pack,
    "int8": partial(gpu_weight.pack, kind="int8_rows"),
    "int4": partial(gpu_weight.pack, kind="int4"),
    EITHER: gpu_weight.pack_either,
}


def _triton_ops(device: torch.device, rounding: str | None, shape: ModelShape) -> Ops:
    import triton

    from outrider_kernels.triton_ops import (
        attention,
        choosing,
        linear,
        rotary_write,
        rows,
        spread,
        work,
    )

    name = f"{device.type}-triton{TRITON_VERSION}-{triton.__version__}"
    logger.info("operations are Triton's kernels (%s)", name)
    return Ops(
        name=name,
        row_plan=None,
        pack=_TRITON_PACKS[rounding],
        pack_table=_TRITON_PACKS["int8" if rounding else None],
        linear=linear.linear,
        lookup=gpu_weight.lookup,
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        silu_mul=rows.silu_mul,
        rotate_and_write=rotary_write.rotate_and_write,
        plan_attention=partial(work.plan_attention, max_tile=largest_tile(shape)),
        frames=partial(Frames, max_tile=largest_tile(shape), spread=spread.spread),
        paged_attention=attention.paged_attention,
        scales_apart=True,
        choose=choosing.choose,
        chooses_on_device=True,
        warm_choosing=choosing.warm,
        first_steps=(0, INVARIANT_SPLIT),
    )


def native_ops(library: Library, *, rounding: str | None = None) -> Ops:
    """Those of a compiled library; rounding is one of ROUNDINGS."""
    name = f"cpu-native{NATIVE_VERSION}-{library.isa}"
    logger.info("operations are compiled C++ (%s), the processor's best", name)
    return Ops(
        name=name,
        row_plan=None,
        pack=partial(native_linear.pack, library, rounding=rounding),
        pack_table=partial(native_linear.pack, library, rounding="int8" if rounding else None),
        linear=partial(native_linear.linear, library),
        lookup=native_linear.lookup,
        rms_norm=partial(native_rows.rms_norm, library),
        add_rms_norm=partial(native_rows.add_rms_norm, library),
        silu_mul=partial(native_rows.silu_mul, library),
        rotate_and_write=partial(native_rows.rotate_and_write, library),
        plan_attention=native_attention.plan_attention,
        paged_attention=partial(native_attention.paged_attention, library),
        set_spin=library.set_spin,
        decoder=partial(NativeDecoder, library),
        choose=partial(native_sampling.choose, library),
    )

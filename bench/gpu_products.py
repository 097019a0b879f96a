"""A GPU's products beside what weights stand for, its tokens beside the engine's numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from bench.gpu_compare import Checks, error_of, name_of, random_values
from outrider.engine.choosing import Rows, choose_tokens
from outrider.engine.rejection import draw_draft
from outrider.engine.sampling import TokenChooser
from outrider.engine.sparse_probs import SparseProbs
from outrider.params import SamplingParams
from outrider_kernels.kv_scaled import round_rows, widen_rows
from outrider_kernels.quantise import quantise_nibbles, quantise_rows, quantise_weight
from outrider_kernels.triton_ops import choosing, linear
from outrider_kernels.triton_ops.configs_linear import KINDS
from outrider_kernels.triton_ops.gpu_weight import pack

TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 2e-6}
"""Of the whole result, by the type that it is rounded to."""
NUM_ROWS = 70
"""Rows of a product: tiles that are whole, and one that is cut."""
MATRICES = ((576, 960), (4096, 4096))
"""Inputs and outputs."""
VOCABULARIES = (1000, 49152, 128256)
NUM_DRAFTS = 4
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.2, top_k=50, seed=2),
    SamplingParams(temperature=0.9, top_p=0.95, min_p=0.01, seed=3),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, seed=4),
    SamplingParams(temperature=1.0, presence_penalty=0.5, logit_bias=((3, 2.0),), seed=5),
)


def product_checks(device: torch.device, matrices: Sequence[tuple[int, int]] = MATRICES) -> Checks:
    """Every kind of weight and type of activations; logits; rows alone and in company."""
    for num_in, num_out in matrices:
        weight = random_values(num_out, num_in, seed=1) / num_in**0.5
        for dtype in TOLERANCE:
            x = random_values(NUM_ROWS, num_in).to(dtype)
            for kind in KINDS:
                case = (device, x, weight.to(dtype), kind)
                name = f"{kind} {name_of(dtype)} {num_in} x {num_out}"
                for invariant in (True, False):
                    mode = "invariant" if invariant else "fast"
                    error = partial(_product_error, *case, invariant)
                    yield f"linear {mode} {name}", error, TOLERANCE[dtype]
                yield f"linear alone equals in company {name}", partial(_differing, *case), 0.0
        wide, narrow = random_values(NUM_ROWS, num_in), weight.bfloat16()
        logits = partial(_product_error, device, wide, narrow, "plain", True)
        yield f"linear to logits {num_in} x {num_out}", logits, TOLERANCE[torch.float32]


def _product_error(
    device: torch.device, x: torch.Tensor, weight: torch.Tensor, kind: str, invariant: bool
) -> float:
    found = linear.linear(x.to(device), pack(weight.to(device), kind), invariant=invariant)
    taken = x.to(weight.dtype)
    if kind == "int8_rows":
        values, scales = quantise_rows(x)
        taken = (values * scales[..., None]).flatten(1)[:, : x.shape[1]]
    return error_of(found, taken.double() @ meaning(weight, kind).double().T)


def meaning(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What a packed weight stands for, float32 [out, in]."""
    if kind == "plain":
        return weight.float()
    if kind == "e4m3":
        return widen_rows(*round_rows(weight, torch.float8_e4m3fn))
    if kind == "int4":
        nibbles, steps, lowest = quantise_nibbles(weight)
        wide = nibbles * steps.float()[..., None] + lowest.float()[..., None]
    else:
        values, scales = quantise_weight(weight)
        wide = values * scales.float()[..., None]
    return wide.flatten(1)[:, : weight.shape[1]]


def _differing(device: torch.device, x: torch.Tensor, weight: torch.Tensor, kind: str) -> float:
    """Values of rows that other rows change."""
    rows, packed = x.to(device), pack(weight.to(device), kind)
    together = linear.linear(rows, packed)
    parts = ((0, 1), (3, 8), (7, 40), (NUM_ROWS - 1, NUM_ROWS))
    alone = [linear.linear(rows[begin:end], packed) for begin, end in parts]
    return float(sum((a != together[b:e]).sum() for a, (b, e) in zip(alone, parts, strict=True)))


def choice_checks(device: torch.device, vocabularies: Sequence[int] = VOCABULARIES) -> Checks:
    """Steps of sequences with all settings, whose drafts stand by match and by chance."""
    for num_ids in vocabularies:
        for by_chance in (False, True):
            mode = "rejection" if by_chance else "exact match"
            yield f"choose {mode} {num_ids}", partial(_wrong, device, num_ids, by_chance), 0.0


def _wrong(device: torch.device, num_ids: int, by_chance: bool) -> float:
    """Sequences whose tokens are not numpy's."""
    step = _make_step(num_ids, by_chance)
    expected = choose_tokens(step, None)
    logits = step[0].logits.to(device)
    there = [rows._replace(logits=logits) for rows in step]
    found = choose_tokens(there, choosing.choose, on_device=True)
    return float(sum(a != b for a, b in zip(found, expected, strict=True)))


def _make_step(num_ids: int, by_chance: bool) -> list[Rows]:
    """Drafts are what the sequence would choose from logits that are a little different."""
    logits = 3 * random_values(len(PARAMS) * (1 + NUM_DRAFTS), num_ids)
    others = logits + 0.3 * random_values(*logits.shape, seed=1)
    step = []
    for i, params in enumerate(PARAMS):
        chooser = TokenChooser(replace(params), num_ids, prompt_len=2)
        first, confirmed = i * (1 + NUM_DRAFTS), [5, 6, 7, 7]
        drafts: list[int] = []
        probs: list[SparseProbs] = []
        for row in others[first : first + NUM_DRAFTS]:
            token, sent = draw_draft(chooser, row, [*confirmed, *drafts])
            drafts.append(token if by_chance else chooser.choose(row, [*confirmed, *drafts]))
            probs.append(sent)
        step.append(Rows(logits, chooser, confirmed, drafts, first, probs if by_chance else ()))
    return step

"""A target and a drafter on Triton's kernels: drafts change no token.

Noise is the CPU's to the last bit, and tokens are chosen by the kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.serving.settings import DraftSettings
from tests.support.draft_stream import run_draft_service
from tests.support.in_process import running_target
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import (
    answer_all,
    ids_of_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)

NUM_TOKENS = 6
K = 3
FEW = [5, 6, 7]
SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 1.5, "top_p": 0.95, "seed": 7},
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "is_twin"),
    [("float32", "auto", True), ("bfloat16", "auto", False), ("bfloat16", "int8", True)],
)
async def test_ids_are_equal_with_and_without_drafts(
    tmp_path: Path, dtype: str, kv_dtype: str, is_twin: bool
) -> None:
    """Two requests at once, greedy and seeded; the drafter is a twin, or repeats what was said.

    For that one few ids are likely, so that it has something to repeat, and is often wrong.
    """
    folder = make_tiny_model(tmp_path, head_dim=64)
    chosen = {"dtype": dtype, "kv_dtype": kv_dtype, "kernels": "triton"}
    twin = {"proposer": "model", "model": str(folder), "kv_tokens": 1024, **chosen}
    drafting = DraftSettings(port=0, **(twin if is_twin else {"proposer": "ngram"}))
    prompts = random_prompts([5, 18]) if is_twin else [FEW * 2, FEW * 6]
    bias = {} if is_twin else {"logit_bias": dict.fromkeys(FEW, 100.0)}

    def requests(k: int) -> list[object]:
        return [
            make_request(prompt, NUM_TOKENS, k=k, **settings, **bias)
            for prompt, settings in zip(prompts, SETTINGS, strict=True)
        ]

    async with (
        run_draft_service(drafting) as drafter,
        running_target(folder, drafter.address, kv_tokens=1024, **chosen) as target,
    ):
        assert "-triton" in (await target.status()).numerics_id
        await wait_for_drafters(target)
        off = await ids_of_all(target, requests(0), 900)
        on = await answer_all(target, requests(K), 900)
        assert [answer.ids for answer in on] == off
        drafted = sum(answer.speculation.drafted for answer in on)
        accepted = sum(answer.speculation.accepted for answer in on)
        assert accepted == drafted > 0 if is_twin else drafted > accepted

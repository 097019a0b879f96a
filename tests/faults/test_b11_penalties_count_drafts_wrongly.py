"""B11. Penalties and biases that count drafts wrongly.

Symptom: with drafts on, a frequency, presence or repetition penalty has no effect, half of it, or
twice of it, because only the last token of a round was counted, or an accepted one twice, or one
that was rejected stayed counted.

Right: the ids of OFF, which are those of a plain step-by-step reference. At a draft's position the
counts include the drafts before it and none behind; a rejected draft leaves no trace. So a drafter
that is right is accepted whole, and one that counts likewise foretells the text.

Reported to vLLM: a penalty silently ignored (18902), a token counted twice (fixed in 33251);
to sglang: only the last accepted token of a step was counted (fixed in 33643); to vmlx-swift (357):
rejected drafts stayed counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import target_pb2
from tests.support.draft_scripts import Drafting, Mute, Partial, Perfect, Wrong
from tests.support.draft_stream import run_draft_service
from tests.support.exact_model import ExactModel
from tests.support.in_process import Target, running_target
from tests.support.precision import chosen_dtype
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.token_requests import make_request, wait_for_drafters

VOCAB_SIZE = 384
NUM_TOKENS = 64
K = 4
PROMPT = [20, 21, 22] * 6
"""Three tokens over and over: what is said again is what penalties act on."""
BIASED_AT = 5
"""The bias forbids the token that is OFF's at this index."""
Settings = Mapping[str, float | Mapping[int, float]]
SETTINGS: dict[str, Settings] = {
    "frequency 2": {"frequency_penalty": 2.0},
    "frequency -2": {"frequency_penalty": -2.0},
    "presence 2": {"presence_penalty": 2.0},
    "repetition 1.3": {"repetition_penalty": 1.3},
    "repetition 0.7": {"repetition_penalty": 0.7},
    "bias": {},
    "all": {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1},
}


def request(settings: Settings, k: int = 0) -> target_pb2.TokenRequest:
    """Greedy, under these settings."""
    return make_request(PROMPT, NUM_TOKENS, k=k, **settings)


def reference(model: ExactModel, settings: Settings) -> list[int]:
    """The text, token after token: every count is taken anew from the text itself.

    No choice may be so close that rounding could decide it.
    """
    history = list(PROMPT)
    for _ in range(NUM_TOKENS):
        logits = model.logits(history).copy()
        penalty = settings.get("repetition_penalty", 1.0)
        for token in set(history):
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        for token, count in Counter(history[len(PROMPT) :]).items():
            logits[token] -= count * settings.get("frequency_penalty", 0.0)
            logits[token] -= settings.get("presence_penalty", 0.0)
        for token, value in settings.get("logit_bias", {}).items():
            logits[token] += value
        second, best = np.sort(logits)[-2:]
        assert best - second > 1e-4
        history.append(int(logits.argmax()))
    return history[len(PROMPT) :]


async def check_settings(
    target: Target, name: str, model: ExactModel
) -> tuple[Settings, list[int]]:
    """The settings of that name, and OFF under them: what the reference says, and not what is said
    without them."""
    plain = await target.ids(request({}))
    settings = dict(SETTINGS[name])
    if name in ("bias", "all"):
        settings["logit_bias"] = {plain[BIASED_AT]: -100.0}
    off = await target.ids(request(settings))
    assert off == reference(model, settings)
    assert off != plain
    return settings, off


@pytest.mark.parametrize("name", SETTINGS)
async def test_penalties_with_scripted_drafts(tiny_model: Path, name: str) -> None:
    """Right, wrong and half right drafts; the right ones are all accepted."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        settings, off = await check_settings(target, name, ExactModel(tiny_model))
        known = {tuple(PROMPT): off}
        shares = {}
        for source in (
            Perfect(known),
            Wrong(known, VOCAB_SIZE),
            Partial(known, 2, VOCAB_SIZE),
        ):
            drafter.behaviour = Drafting(source)
            answer = await target.answer(request(settings, K))
            assert answer.ids == off
            assert answer.speculation.drafted > 0
            shares[type(source)] = answer.speculation.accepted / answer.speculation.drafted
        assert shares[Perfect] == 1
        assert shares[Wrong] == 0
        assert 0.4 < shares[Partial] < 0.6
        assert drafter.record.problems == []


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 11}], ids=["0", "0.8"])
async def test_penalties_with_real_drafts(tiny_model: Path, sampling: dict[str, float]) -> None:
    """Guesses from the text, and the target's own weights, which count as the target does and so
    are right nearly always; greedy and seeded."""
    everything = SETTINGS["all"] | {"logit_bias": {12: 3.0}} | sampling
    off: list[int] = []
    for proposer in ("ngram", "model"):
        settings = DraftSettings(
            port=0, proposer=proposer, model=str(tiny_model), dtype=chosen_dtype()
        )
        async with (
            run_draft_service(settings) as drafter,
            running_target(tiny_model, drafters=drafter.address) as target,
        ):
            await wait_for_drafters(target)
            off = off or await target.ids(request(everything))
            answer = await target.answer(request(everything, K))
            assert answer.ids == off
            if proposer == "model":
                assert answer.speculation.accepted >= 0.99 * answer.speculation.drafted > 0

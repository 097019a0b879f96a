"""Going on behind tokens that were generated elsewhere: the text that it would have been there."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from protos.outrider.v1 import sampling_pb2, target_pb2
from tests.support.draft_scripts import Drafting, Mute, Partial, Perfect
from tests.support.in_process import Answer, Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import make_tiny_model
from tests.support.token_requests import make_request, random_prompts, wait_for_drafters

VOCAB_SIZE = 384
NUM_TOKENS = 44
(PROMPT,) = random_prompts([21], VOCAB_SIZE, seed=2)
CUTS = (1, 10, 11, 12, 27, NUM_TOKENS - 1)
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.4}
SETTINGS = {
    "greedy": {},
    "greedy, penalties": PENALTIES,
    "seeded": {"temperature": 0.9, "seed": 11, "top_p": 0.9},
    "seeded, penalties": {"temperature": 0.9, "seed": 2**64 - 1, "top_k": 50, **PENALTIES},
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with 384 ids."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab_size=VOCAB_SIZE)


def request_with(settings: dict, k: int, resumed: list[int]) -> target_pb2.TokenRequest:
    """The request, as another target would get it after `resumed`."""
    request = make_request(PROMPT, NUM_TOKENS, k=k, **settings)
    request.resumed_token_ids.extend(resumed)
    request.logprobs = 2
    return request


def check(rest: Answer, whole: Answer, cut: int) -> None:
    """Tokens and values go on where they were cut, and the usage counts all."""
    assert rest.ids == whole.ids[cut:]
    assert [t.logprob for t in rest.tokens] == [t.logprob for t in whole.tokens[cut:]]
    assert rest.finish.reason == whole.finish.reason
    assert rest.finish.usage.prompt_tokens == len(PROMPT)
    assert rest.finish.usage.completion_tokens == NUM_TOKENS


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_the_text_goes_on_as_it_would_have(
    tiny_model: Path, settings: dict, prefix_cache: bool
) -> None:
    """Cut anywhere, at block boundaries as well, with drafts and without, on a fresh target."""
    async with running_target(tiny_model) as target:
        whole = await target.answer(request_with(settings, 0, []))
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(
            tiny_model, drafters=drafter.address, prefix_cache=prefix_cache, step_tokens=32
        ) as target,
    ):
        await wait_for_drafters(target)
        for cut in CUTS:
            rest = await target.answer(request_with(settings, 0, whole.ids[:cut]))
            check(rest, whole, cut)
        known = {tuple(PROMPT): whole.ids}
        for source in (Perfect(known), Partial(known, 2, VOCAB_SIZE)):
            drafter.behaviour = Drafting(source)
            for cut in CUTS:
                rest = await target.answer(request_with(settings, 4, whole.ids[:cut]))
                check(rest, whole, cut)
                assert rest.speculation.accepted > 0 or cut >= NUM_TOKENS - 2
        assert drafter.record.problems == []


async def test_stops_count_from_the_beginning(tiny_model: Path) -> None:
    """min_tokens and stop tokens see the resumed tokens as generated ones."""
    async with running_target(tiny_model) as target:
        whole = await target.answer(make_request(PROMPT, NUM_TOKENS))
        ids = whole.ids
        # Not one that min_tokens forbids earlier: the text would go another way from there.
        stop_id = next(ids[i] for i in range(20, NUM_TOKENS) if ids[i] not in ids[:i])
        request = make_request(PROMPT, NUM_TOKENS, stop_token_ids=[stop_id])
        request.stopping.min_tokens = 15
        stopped = await target.answer(request)
        assert stopped.finish.reason == sampling_pb2.FINISH_REASON_STOP
        for cut in (3, 14, len(stopped.ids) - 1):
            request.resumed_token_ids[:] = stopped.ids[:cut]
            rest = await target.answer(request)
            assert rest.ids == stopped.ids[cut:]
            assert rest.finish.reason == sampling_pb2.FINISH_REASON_STOP


async def refusal_of(target: Target, request: target_pb2.TokenRequest) -> str:
    """Why it is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await target.answer(request)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return refusal.value.details()


async def test_nothing_is_left_to_generate(tiny_model: Path) -> None:
    """As many tokens as were asked for, or an id that is none: refused by name."""
    async with running_target(tiny_model) as target:
        request = make_request(PROMPT, 4)
        request.resumed_token_ids.extend([5, 6, 7, 8])
        assert (await refusal_of(target, request)).startswith("stopping.max_tokens")
        request.resumed_token_ids[:] = [VOCAB_SIZE]
        assert (await refusal_of(target, request)).startswith("resumed_token_ids")

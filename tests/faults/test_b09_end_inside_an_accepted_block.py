"""B09. An end-of-sequence or stop token accepted in the middle of a block.

Symptom: the text goes on behind its end, but only when the end token was an accepted draft and not
the last token of the round, so it looks random. Or the reverse: a drafter that has met an end token
which the target does not want never proposes anything again.

Right: ids, finish reason and usage are those of OFF, and no id follows the stop. Where the target
does not want the end, generation goes on and later drafts are used.

Reported to transformers (47912): only the last token of a round was looked at; likewise to
koboldcpp (1276). The reverse was fixed in openvino.genai (change 3293): a draft that had ended
could not be continued after the target had rejected its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import sampling_pb2
from tests.support.draft_scripts import Drafting, Mute, Perfect, ScriptedSequence
from tests.support.draft_stream import run_draft_service
from tests.support.in_process import Answer, Target, running_target
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import EOS_TOKEN_ID
from tests.support.token_requests import (
    answer_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)

VOCAB_SIZE = 384
STOP, LENGTH = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH
BEHIND_THE_END = (7, 300, 21, 8, 9)  # arbitrary tokens
# Makes texts of the random model end within a few dozen tokens.
ENDING = {"logit_bias": {EOS_TOKEN_ID: 1.5}, "ignore_eos": False}


def outcome(answer: Answer) -> tuple[list[int], int, int, int]:
    """What must not depend on drafts."""
    usage = answer.finish.usage
    return answer.ids, answer.finish.reason, usage.prompt_tokens, usage.completion_tokens


async def five_that_end(target: Target) -> list[tuple[list[int], Answer]]:
    """Prompts whose texts end by end-of-sequence, at five different lengths up to 40."""
    prompts = random_prompts([4 + i % 30 for i in range(64)], VOCAB_SIZE)
    answers = await answer_all(target, [make_request(each, 40, **ENDING) for each in prompts])
    ended: dict[int, tuple[list[int], Answer]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.finish.reason == STOP and len(answer.ids) > 3:
            assert answer.ids.index(EOS_TOKEN_ID) == len(answer.ids) - 1
            ended.setdefault(len(answer.ids), (prompt, answer))
    assert len(ended) >= 5
    return list(ended.values())[:5]


async def test_end_of_sequence_inside_an_accepted_block(tiny_model: Path) -> None:
    """Five texts that end by themselves, the right tokens proposed up to the end and arbitrary ones
    behind it, k from 1 to 8: everything as in OFF, the end an accepted draft in most cases."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        texts = await five_that_end(target)
        known = {tuple(prompt): answer.ids for prompt, answer in texts}
        drafter.behaviour = Drafting(Perfect(known, then=BEHIND_THE_END))
        for k in range(1, 9):
            requests = [make_request(prompt, 40, k=k, **ENDING) for prompt, _ in texts]
            answers = await answer_all(target, requests)
            assert [outcome(on) for on in answers] == [outcome(off) for _, off in texts]
            for on in answers:
                # Drafts behind the end were never asked for, so none counts as wrong.
                assert on.speculation.accepted == on.speculation.drafted
                assert on.speculation.drafted >= (len(on.ids) - 1) * k // (k + 1)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
async def test_stop_token_at_every_index(tiny_model: Path, k: int) -> None:
    """A stop token that is first seen at output index 0, 1, ... 12 ends the text there."""
    prompts = random_prompts([9, 16, 31], VOCAB_SIZE)
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        full = await answer_all(target, [make_request(each, 30) for each in prompts])
        known = {tuple(prompt): answer.ids for prompt, answer in zip(prompts, full, strict=True)}
        drafter.behaviour = Drafting(Perfect(known, then=BEHIND_THE_END))
        cases = [
            (prompt, answer.ids[index])
            for prompt, answer in zip(prompts, full, strict=True)
            for index in range(13)
        ]
        off, on = [
            await answer_all(
                target,
                [make_request(p, 30, k=each_k, stop_token_ids=[stop]) for p, stop in cases],
            )
            for each_k in (0, k)
        ]
        assert [outcome(each) for each in on] == [outcome(each) for each in off]
        for (prompt, stop), answer in zip(cases, on, strict=True):
            first = known[tuple(prompt)].index(stop)
            assert answer.ids == known[tuple(prompt)][: first + 1]
            assert answer.finish.reason == STOP


@dataclass(frozen=True)
class EndsEarly:
    """The known output, but with an end token at every place where `early` says so."""

    known: dict[tuple[int, ...], list[int]]
    early: Callable[[int], bool]
    end: int

    def token(self, sequence: ScriptedSequence, position: int, offset: int) -> int | None:
        index = position - sequence.opening.prompt_len
        if self.early(index):
            return self.end
        return Perfect(self.known).token(sequence, position, offset)


@pytest.mark.parametrize("end", [EOS_TOKEN_ID, 77])
async def test_an_end_that_only_the_drafter_wants(tiny_model: Path, end: int) -> None:
    """End-of-sequence or a stop token proposed at every seventh place, where the target goes on:
    the text of OFF, and all drafts between those places are used."""
    prompts = random_prompts([5, 16, 40], VOCAB_SIZE)
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)

        def requests(k: int) -> Sequence[object]:
            # The end is never likely enough to be chosen.
            settings = {"ignore_eos": False, "stop_token_ids": [77], "logit_bias": {2: -9, 77: -9}}
            return [make_request(prompt, 60, k=k, **settings) for prompt in prompts]

        off = await answer_all(target, requests(0))
        assert {answer.finish.reason for answer in off} == {LENGTH}
        known = {tuple(prompt): answer.ids for prompt, answer in zip(prompts, off, strict=True)}
        drafter.behaviour = Drafting(EndsEarly(known, lambda index: index % 7 == 5, end))
        for k in (1, 3, 8):
            on = await answer_all(target, requests(k))
            assert [outcome(each) for each in on] == [outcome(each) for each in off]
            for answer in on:
                assert answer.speculation.accepted > (60 - 9) * k / (k + 1) * 0.7


async def test_the_real_drafter_goes_on_behind_an_end_that_was_rejected(tiny_model: Path) -> None:
    """The prompt is full of words behind each of which stands an end-of-sequence, so the lookup
    drafter proposes that again and again; the target goes on, and later guesses are used."""
    words = random_prompts([150], VOCAB_SIZE)[0]
    prompt = [token for word in words for token in (word, EOS_TOKEN_ID)]
    settings = {"ignore_eos": False, "logit_bias": {EOS_TOKEN_ID: -9}}
    async with (
        run_draft_service(DraftSettings(port=0)) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        off = await target.answer(make_request(prompt, 150, **settings))
        ids: list[int] = []
        rounds: list[tuple[int, int]] = [(0, 0)]  # drafted, accepted so far
        request = make_request(prompt, 150, k=4, **settings)
        async for chunk in target.stub.Generate(request, timeout=60):
            ids += [token.id for token in chunk.tokens]
            rounds.append((chunk.speculation.drafted, chunk.speculation.accepted))
        assert ids == off.ids
        sizes = [now[0] - before[0] for before, now in zip(rounds, rounds[1:], strict=False)]
        assert 1 in sizes, "no guess ended early"
        _, accepted_until_then = rounds[sizes.index(1) + 1]
        assert rounds[-1][1] > accepted_until_then

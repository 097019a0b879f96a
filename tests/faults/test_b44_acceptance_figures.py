"""B44: figures of acceptance that are wrong, above 1, no numbers, or fatal.

Symptom: dashboards show rates that cannot be, a fault in the metrics stops the serving, or nobody
sees that no draft is used. Right: accepted drafts are never more than verified ones; those up to
the stop, the target's own tokens and the tokens without drafts are the usage; rounds without drafts
lower no rate; rates do not rise with the position; no number is none, no counter falls; and where
drafts are not used, status, metrics and log say why. Reported in public of several servers: tokens
behind the end that count as accepted, rates above 1, divisions by zero before the first request, a
counter that was to fall and took the engine with it, drafts configured and never engaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.draft_scripts import (
    Behaviour,
    Closing,
    Drafting,
    Going,
    Junk,
    Late,
    Mute,
    Partial,
    Perfect,
    Wrong,
)
from tests.support.in_process import Answer, Target, running_target
from tests.support.scrapes import Scrape, scrape
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.stacks import full_stack
from tests.support.target_sums import check_target
from tests.support.token_requests import (
    answer_all,
    make_request,
    random_prompts,
    wait_for_drafters,
)
from tests.support.token_streams import AUTO, OFF, greedy, quiet_status

pytestmark = pytest.mark.timeout(60)

VOCAB_SIZE = 384
K = 5
LENGTH = 48
BEHIND_THE_END = (7, 300, 21, 8, 9)


async def checked_scrape(target: Target, before: Scrape | None = None) -> Scrape:
    """A scrape over HTTP in which everything adds up."""
    now = await scrape(target.admin_port)
    check_target(now, before)
    return now


def speculation(now: Scrape, before: Scrape) -> tuple[float, float, float]:
    """Rounds with drafts, drafts verified and drafts that stood, since `before`."""
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    rounds, drafted, accepted = (
        now(f"spec_decode_{name}") - before(f"spec_decode_{name}") for name in names
    )
    return rounds, drafted, accepted


def generated(now: Scrape) -> float:
    """Tokens made."""
    return now("tokens_total", kind="generated")


def expected(length: int) -> tuple[int, int, int]:
    """The same for a text of that length, its stop included, when all drafts are right."""
    rounds = drafted = 0
    left = length - 1  # the first token comes with the prompt
    while left > 0:
        rounds += 1
        drafted += min(K, left)
        left -= K + 1
    return rounds, drafted, drafted


def check_usage(now: Scrape, before: Scrape, answers: Sequence[Answer]) -> None:
    """The metrics say what the clients were told, token by token."""
    usage = sum(answer.finish.usage.completion_tokens for answer in answers)
    accepted = sum(token.drafted for answer in answers for token in answer.tokens)
    plain = sum(answer.speculation.plain_steps for answer in answers)
    rounds, _, in_metrics = speculation(now, before)
    assert in_metrics == accepted
    assert usage == generated(now) - generated(before)
    own = usage - accepted - plain
    assert 0 <= rounds - own <= len(answers)  # a text that ends with a draft has one less


async def test_before_any_traffic(tiny_model: Path) -> None:
    """Numbers, all of them 0, and one series for each position from the start."""
    async with running_target(tiny_model, admin=True, max_draft_tokens=K) as target:
        now = await checked_scrape(target)
        assert now("engine_up") == 1
        assert set(now.by("spec_decode_num_accepted_tokens_per_pos_total", "position")) == {
            *map(str, range(K))
        }
        assert generated(now) == now("requests_started_total") == 0
        assert not now.has("engine_last_step_timestamp_seconds")


async def test_a_stop_at_every_place_of_a_block(tiny_model: Path) -> None:
    """Right drafts, five a round, and a stop at the first to the sixth token of the second round:
    what was accepted behind it counts nowhere."""
    (prompt,) = random_prompts([12], VOCAB_SIZE)
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafter.address, admin=True) as target,
    ):
        await wait_for_drafters(target)
        text = await target.ids(make_request(prompt, LENGTH))
        known = {tuple(prompt): text}
        drafter.behaviour = Drafting(Perfect(known, then=BEHIND_THE_END))
        before = await checked_scrape(target)
        places = set()
        for stop in text[1:20]:
            length = text.index(stop) + 1
            request = make_request(prompt, LENGTH, k=K, stop_token_ids=[stop])
            answer = await target.answer(request)
            now = await checked_scrape(target, before)
            assert len(answer.ids) == length
            assert speculation(now, before) == expected(length)
            check_usage(now, before, [answer])
            places.add((length - 2) % (K + 1))
            before = now
        assert places == set(range(K + 1))


@pytest.mark.parametrize(("right", "rate", "tokens_a_round"), [(0, 0.0, 1), (2, 0.4, 3)])
async def test_drafts_that_are_right_for_a_while(
    tiny_model: Path, right: int, rate: float, tokens_a_round: int
) -> None:
    """Two right ones of five read 0.4 and three tokens a round; wrong ones read 0 and one. Texts
    without drafts beside them change neither."""
    prompts = random_prompts([9, 14], VOCAB_SIZE)
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(tiny_model, drafter.address, admin=True) as target,
    ):
        await wait_for_drafters(target)
        texts = [await target.ids(make_request(each, 120)) for each in prompts]
        known = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
        source = Partial(known, right, VOCAB_SIZE) if right else Wrong(known, VOCAB_SIZE)
        drafter.behaviour = Drafting(source)
        before = await checked_scrape(target)
        # The last round of a text may have room for fewer drafts, so it is not waited for.
        call = target.stub.Generate(make_request(prompts[0], 120, k=K), timeout=30)
        for _ in range(12):
            await call.read()
        call.cancel()
        await quiet_status(target)
        now = await checked_scrape(target, before)
        rounds, drafted, accepted = speculation(now, before)
        assert rounds >= 10
        assert accepted / drafted == rate
        assert (generated(now) - generated(before) - 1) / rounds == tokens_a_round
        positions = [
            now("spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(K)
        ]
        assert positions == [rounds] * right + [0] * (K - right)

        assert await target.ids(make_request(prompts[1], 60)) == texts[1][:60]
        later = await checked_scrape(target, now)
        assert speculation(later, now) == (0, 0, 0)
        assert generated(later) - generated(now) == 60
        assert later("round_draft_tokens_count") - now("round_draft_tokens_count") == 59


FAILING: dict[str, Behaviour] = {
    "mute": Mute(),
    "junk": Junk(),
    "late": Late(Drafting(Perfect(lambda sequence: [5] * 200)), 0.01),
    "closing": Closing(Drafting(Perfect(lambda sequence: [5] * 200)), 7),
    "forgetting": Going(Drafting(Perfect(lambda sequence: [5] * 200)), 3, every_epoch=True),
}


@pytest.mark.parametrize("name", FAILING)
async def test_drafts_that_fail_in_a_pool_that_is_too_small(tiny_model: Path, name: str) -> None:
    """Preemptions, cancels and a drafter that fails, scraped all the while: every scrape adds up,
    and in the end the metrics say what the clients were told."""
    prompts = random_prompts([20 + i for i in range(8)], VOCAB_SIZE)
    async with (
        ScriptedDrafter(FAILING[name]) as drafter,
        running_target(
            tiny_model, drafter.address, admin=True, kv_tokens=256, prefix_cache=False
        ) as target,
    ):
        await wait_for_drafters(target)
        before = await checked_scrape(target)
        done = asyncio.Event()

        async def watch() -> int:
            last, count = before, 0
            while not done.is_set():
                last = await checked_scrape(target, last)
                count += 1
            return count

        watching = asyncio.create_task(watch())
        leaving = [target.stub.Generate(greedy(each, 100, AUTO), timeout=50) for each in prompts]
        for call in leaving[:4]:
            await call.read()
        for call in leaving:
            call.cancel()
        modes = [AUTO if i % 4 else OFF for i in range(8)]
        requests = [greedy(*each) for each in zip(prompts, [70] * 8, modes, strict=True)]
        answers = await answer_all(target, requests, 50)
        done.set()
        assert await watching > 3
        await quiet_status(target)
        now = await checked_scrape(target, before)
        assert now("preemptions_total") > 0
        assert now("requests_total", outcome="finished") >= 8
        assert now("requests_total", outcome="failed") == 0
        stats = [answer.speculation for answer in answers]
        assert sum(each.accepted for each in stats) <= sum(each.drafted for each in stats)
        assert sum(each.accepted for each in stats) == sum(
            token.drafted for answer in answers for token in answer.tokens
        )


async def test_an_error_in_the_metrics_costs_no_request(tiny_model: Path) -> None:
    """Every distribution and every span fails: the text is whole, the errors are counted, and each
    is in the log once, not once a step."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault of the metrics")

    with capture_logs() as entries:
        async with running_target(tiny_model, admin=True) as target:
            text = await target.ids(make_request([5, 6, 7], 40))
            observer = target.service._observer
            for histogram in (
                observer._queue,
                observer._prefill,
                observer._step,
                observer._round_drafts,
            ):
                histogram.observe = fail
            observer.tracing.tracer = None
            assert await target.ids(make_request([5, 6, 7], 40)) == text
            now = await scrape(target.admin_port)
            assert now("telemetry_errors_total") > 40
            assert now("engine_up") == 1
            assert now("requests_total", outcome="finished") == 2
    said = [each["where"] for each in entries if each["event"] == "telemetry failed"]
    assert len(said) == len(set(said)) > 0


async def test_an_ordinary_request_has_drafts(tiny_model: Path) -> None:
    """The default drafter beside the default target, asked without a word about drafts: some are
    verified, if not in the first answer of so quick a model, and the drafter counts as ready."""
    async with full_stack(tiny_model, admin=True) as (gateway, target):
        await wait_for_drafters(target)
        request = pb.GenerateRequest(
            text="a rose is a rose is a rose", sampling=sampling_pb2.SamplingParams(temperature=0)
        )
        request.stopping.max_tokens, request.stopping.ignore_eos = 200, True
        async with asyncio.timeout(60):
            while True:
                await gateway.ask(request)
                now = await checked_scrape(target)
                if now("spec_decode_num_draft_tokens_total") > 0:
                    break
        assert now.by("drafters", "state") == {
            "ready": 1, "silent": 0, "connecting": 0, "backoff": 0, "refused": 0
        }  # fmt: skip


async def test_where_no_drafts_come_everybody_says_why(tiny_model: Path) -> None:
    """Nobody listens at the drafter's address: state, reason, metrics and log."""
    with capture_logs() as entries:
        async with running_target(tiny_model, "127.0.0.1:1", admin=True) as target:
            await target.ids(greedy([5, 6, 7], 30, AUTO))
            status = await target.status()
            while not status.drafters[0].reason.startswith("UNAVAILABLE"):
                await asyncio.sleep(0.02)
                status = await target.status()
            assert status.state == "degraded"
            now = await checked_scrape(target)
            assert now.by("drafters", "state")["ready"] == 0
            assert sum(now.by("drafters", "state").values()) == 1
            assert now("drafter_connect_attempts_total") >= 1
            assert now("spec_decode_num_draft_tokens_total") == 0
    (said,) = [each for each in entries if each["event"] == "drafter unused"]
    assert said["reason"].startswith("UNAVAILABLE")

"""The target's metrics: every scrape adds up, at whatever moment it comes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from outrider.params import SpeculationMode
from outrider.serving import discovery
from outrider.serving.errors import Overloaded
from target_service.metrics import TargetMetrics
from target_service.observer import Observer
from tests.support.draft_scripts import Closing, Drafting, Perfect, ScriptedSequence
from tests.support.function_target import WAIT_S, next_token, running_target, solo
from tests.support.hub_world import honest, hub_to
from tests.support.scrapes import Scrape, scrape_registry
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.target_parts import MAX_DRAFT_TOKENS
from tests.support.target_sums import check_target

LABELLED = {
    "requests_total": {"finished", "failed", "cancelled"},
    "tokens_total": {"prefilled", "cached_prompt", "generated"},
    "spec_decode_num_accepted_tokens_per_pos_total": set(map(str, range(MAX_DRAFT_TOKENS))),
    "kv_blocks": {"free", "used"},
    "drafters": {"ready", "silent", "connecting", "backoff", "refused"},
    "draft_unused_total": {
        *("late", "stale", "mismatch", "gap", "duplicate", "replaced", "trimmed", "window"),
        *("malformed", "finished", "lost"),
    },
    "draft_frames_total": {
        *("used", "stale", "gap", "malformed", "flood", "resync", "crash", "unexpected_hello"),
        *("finished", "unknown_sequence", "stale_gone"),
    },
}
PLAIN = {
    *("requests_started_total", "requests_refused_total", "requests_running", "requests_waiting"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "draft_proposed_tokens_total"),
    *("drafter_connect_attempts_total", "preemptions_total", "busy_seconds_total"),
    *("kv_pool_blocks", "kv_wasted_slots", "kv_block_slots", "engine_up"),
    "telemetry_errors_total",
}
HISTOGRAMS = {
    *("draft_wait_seconds", "draft_round_trip_seconds", "window_tokens", "round_draft_tokens"),
    *("queue_seconds", "prefill_seconds", "step_seconds", "batch_tokens", "batch_sequences"),
}


def known(sequence: ScriptedSequence) -> list[int]:
    """What the target will say."""
    return solo(sequence.prompt, sequence.opening.max_len - sequence.opening.prompt_len)


async def test_all_names_are_there_from_the_start():
    """Every series that dashboards ask for, at 0, with every value that its label can have."""
    async with running_target() as target:
        now = scrape_registry(target.registry)
        check_target(now)
        names = {name.removeprefix("outrider_") for name, _ in now.samples}
        expected = PLAIN | set(LABELLED) | {f"{name}_count" for name in HISTOGRAMS}
        rest = {name for name in names if not name.endswith(("_bucket", "_sum"))}
        assert rest - {"energy_joules_total"} == expected
        for name, values in LABELLED.items():
            (label,) = {key for each, labels in now.samples for key, _ in labels
                        if each == f"outrider_{name}"}  # fmt: skip
            assert set(now.by(name, label)) == values
        assert now("kv_blocks", state="free") == now("kv_pool_blocks") == 64


def test_before_the_model_is_loaded_it_is_only_not_up():
    """A scrape then is no error, and says nothing of what is not there."""
    registry = CollectorRegistry()
    TargetMetrics(registry, Observer(registry), 4)
    now = scrape_registry(registry)
    now.check_numbers()
    assert now("engine_up") == 0
    assert not now.has("requests_running")


@pytest.mark.parametrize("seed", range(3))
async def test_every_scrape_adds_up(seed):
    """Any mix of requests that end, fail, leave and are refused, in a pool too small for all and
    with a drafter that hangs up now and then: scraped all the time."""
    rng = random.Random(seed)
    async with (
        ScriptedDrafter(Closing(Drafting(Perfect(known)), 40)) as drafter,
        running_target(drafter.address, num_blocks=14, max_sequences=4, max_waiting=8) as target,
    ):
        target.model.fails = lambda request: request.sequence.prompt_len == 7
        pages: list[str] = []

        async def watch() -> None:
            while True:
                pages.append(generate_latest(target.registry).decode())
                await asyncio.sleep(0.002)

        watching = asyncio.create_task(watch())
        num_refused = 0
        target.submit([1] * 7, 5)  # which fails
        for _ in range(50):
            prompt = [rng.randrange(1, 97) for _ in range(rng.randrange(1, 25))]
            mode = rng.choice([SpeculationMode.OFF, SpeculationMode.AUTO, SpeculationMode.AUTO])
            try:
                request = target.submit(prompt, rng.randrange(1, 30), mode=mode, max_wait_s=0.002)
            except Overloaded:
                num_refused += 1
                await asyncio.sleep(0.02)
                continue
            if rng.random() < 0.2:
                await asyncio.sleep(0.002)
                target.batcher.cancel(request)
        await target.settle()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        now = scrape_registry(target.registry)
        scrapes = [*map(Scrape, pages), now]
        for before, after in itertools.pairwise(scrapes):
            check_target(after, before)
        assert len(scrapes) > 20
        assert any(each("requests_running") > 1 and each("requests_waiting") for each in scrapes)
        ended = now.by("requests_total", "outcome")
        assert all(ended.values())
        assert now("requests_refused_total") == num_refused
        assert now("preemptions_total") > 0
        assert now("spec_decode_num_accepted_tokens_total") > 0
        totals = target.batcher.totals
        assert now("tokens_total", kind="generated") == totals.generated_tokens
        assert now("engine_last_step_timestamp_seconds") == pytest.approx(totals.last_step_time)


async def test_a_dead_engine_is_not_up():
    """The scrape goes on, and says so."""
    async with running_target(max_sequences=2) as target:
        target.model.fails = lambda request: True
        for n in range(1, 9):
            target.submit([n], 5)
        async with asyncio.timeout(WAIT_S):
            while not target.num_deaths:
                await asyncio.sleep(0.001)
        now = scrape_registry(target.registry)
        check_target(now)
        assert now("engine_up") == 0
        assert now("requests_total", outcome="failed") == 8


async def test_steps_that_waited_for_drafts_show_how_long():
    """Drafts that never come cost their wait; steps without any wish do not count as waits."""
    async with running_target() as target:
        target.submit([3, 3], 20)
        await target.settle()
        before = scrape_registry(target.registry)
        target.hub.late = True
        prompt = next([n] for n in range(1, 97) if len(solo([n], 100)) == 100)
        target.submit(prompt, 100, mode=SpeculationMode.AUTO, max_wait_s=0.02)
        await target.settle()
        now = scrape_registry(target.registry)
        assert now("draft_wait_seconds_count") > before("draft_wait_seconds_count")
        assert now("draft_wait_seconds_sum") <= target.batcher.draft_wait_s
        assert next_token(prompt) == solo(prompt, 1)[0]


async def test_attempts_to_connect_never_fall(monkeypatch: pytest.MonkeyPatch):
    """Not even when a drafter leaves its name for good."""
    monkeypatch.setattr(discovery, "REFRESH_S", 0.01)
    async with ScriptedDrafter(honest()) as drafter:
        behind = {drafter.address, "127.0.0.1:1"}

        async def look_up(address: str) -> set[str]:
            return set(behind)

        async with hub_to("draft:50053", resolve=look_up) as world:
            await world.until(lambda: len(world.hub.clients) == 2)
            await world.until(lambda: all(c.connect_attempts for c in world.hub.clients))
            attempts = world.hub.connect_attempts
            behind.discard("127.0.0.1:1")
            await world.until(lambda: len(world.hub.clients) == 1)
            assert world.hub.connect_attempts >= attempts >= 2

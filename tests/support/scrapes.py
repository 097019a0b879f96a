"""One scrape of a service's `/metrics`, and what must add up in every one of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.prometheus import read_page

MAX_BYTES = 200_000


class Scrape:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families
            for sample in family.samples
        }

    def sum(self, name: str, **labels: str) -> float:
        """Over all series of that name that have these labels. KeyError if there is none."""
        values = [
            value
            for (each, pairs), value in self.samples.items()
            if each == name and labels.items() <= dict(pairs).items()
        ]
        if not values:
            raise KeyError(f"no {name} with {labels}")
        return sum(values)

    def counters(self) -> Iterator[tuple[tuple[str, tuple[tuple[str, str], ...]], float]]:
        """What may never fall: counters, and the counts, sums and buckets of histograms."""
        for family in self.families:
            if family.type in ("counter", "histogram"):
                for sample in family.samples:
                    yield (sample.name, tuple(sorted(sample.labels.items()))), sample.value


async def scrape(port: int) -> Scrape:
    """What the service at this port says now."""
    url = f"http://127.0.0.1:{port}/metrics"
    return Scrape(await asyncio.to_thread(read_page, url))


def assert_sound(now: Scrape, before: Scrape | None = None) -> None:
    """Small, nothing infinite or NaN, and no counter below what it was."""
    assert len(now.text) < MAX_BYTES
    assert all(math.isfinite(value) for value in now.samples.values())
    later = dict(now.counters())
    fallen = {
        key: (value, later.get(key))
        for key, value in (before.counters() if before else ())
        if later.get(key, -1.0) < value
    }
    assert fallen == {}


def assert_gateway_adds_up(now: Scrape) -> None:
    """Every request and every token is in exactly one place."""
    assert now.sum("outrider_requests_started_total") == (
        now.sum("outrider_requests_total") + now.sum("outrider_requests_running")
    )
    tokens = {
        kind: now.sum("outrider_tokens_total", kind=kind)
        for kind in ("generated", "delivered", "withheld")
    }
    held = now.sum("outrider_tokens_held")
    assert tokens["generated"] == tokens["delivered"] + tokens["withheld"] + held
    assert now.sum("outrider_requests_finished_by_reason_total") == now.sum(
        "outrider_requests_total", outcome="finished"
    )


def assert_target_adds_up(now: Scrape) -> None:
    """Every request, block and draft token is in exactly one place."""
    assert now.sum("outrider_requests_started_total") == (
        now.sum("outrider_requests_total")
        + now.sum("outrider_requests_running")
        + now.sum("outrider_requests_waiting")
    )
    assert now.sum("outrider_kv_blocks") == now.sum("outrider_kv_pool_blocks")
    accepted = now.sum("outrider_spec_decode_num_accepted_tokens_total")
    drafted = now.sum("outrider_spec_decode_num_draft_tokens_total")
    assert accepted == now.sum("outrider_spec_decode_num_accepted_tokens_per_pos_total")
    assert accepted <= drafted
    # The rest waits in a tail.
    assert drafted + now.sum("outrider_draft_unused_total") <= now.sum(
        "outrider_draft_proposed_tokens_total"
    )


def assert_draft_adds_up(now: Scrape) -> None:
    """Every sequence is open or has ended in one way."""
    assert now.sum("outrider_drafter_sequences_started_total") == (
        now.sum("outrider_drafter_sequences_total") + now.sum("outrider_draft_sessions")
    )

"""What must add up in every single scrape of a service, whatever it is doing at that moment."""

from __future__ import annotations

from tests.support.scrapes import Scrape


def total(scrape: Scrape, name: str, label: str) -> float:
    """Over all values of that label."""
    return sum(scrape.by(name, label).values())


def assert_gateway_adds_up(now: Scrape) -> None:
    """Every request and every token is in exactly one place."""
    outcomes = now.by("requests_total", "outcome")
    assert now("requests_started_total") == sum(outcomes.values()) + now("requests_running")
    assert total(now, "requests_started_by_door_total", "door") == now("requests_started_total")
    assert total(now, "requests_finished_by_reason_total", "reason") == outcomes["finished"]
    connections = now.by("http_connections_total", "stage")
    assert now("http_connections_open") <= connections["established"] <= connections["accepted"]
    tokens = now.by("tokens_total", "kind")
    passed_on = tokens["delivered"] + tokens["withheld"]
    assert tokens["generated"] == passed_on + now("tokens_held")


def assert_target_adds_up(now: Scrape) -> None:
    """Every request, block and draft token is in exactly one place."""
    ended = total(now, "requests_total", "outcome")
    assert now("requests_started_total") == (
        ended + now("requests_running") + now("requests_waiting")
    )
    assert total(now, "kv_blocks", "state") == now("kv_pool_blocks")
    accepted = now("spec_decode_num_accepted_tokens_total")
    drafted = now("spec_decode_num_draft_tokens_total")
    assert accepted == total(now, "spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert accepted <= drafted
    # What is missing still waits in a tail.
    used_up = drafted + total(now, "draft_unused_total", "reason")
    assert used_up <= now("draft_proposed_tokens_total")


def assert_draft_adds_up(now: Scrape) -> None:
    """Every sequence is open or has ended in one way."""
    ended = total(now, "drafter_sequences_total", "outcome")
    assert now("drafter_sequences_started_total") == ended + now("draft_sessions")

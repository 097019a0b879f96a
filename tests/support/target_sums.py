"""What holds in every scrape of a target, beyond what the dashboards rely on."""

from __future__ import annotations

from tests.support.scrapes import Scrape
from tests.support.sums import assert_target_adds_up, total


def check_target(now: Scrape, before: Scrape | None = None) -> None:
    """Whatever it is in the middle of; `before` is an earlier scrape of the same process."""
    now.check_numbers(before)
    assert_target_adds_up(now)
    assert set(now.by("requests_total", "outcome")) == {"finished", "failed", "cancelled"}
    used_slots = now("kv_blocks", state="used") * now("kv_block_slots")
    assert now("kv_wasted_slots") <= used_slots

    rounds = now("spec_decode_num_drafts_total")
    drafted = now("spec_decode_num_draft_tokens_total")
    accepted = now("spec_decode_num_accepted_tokens_total")
    by_position = now.by("spec_decode_num_accepted_tokens_per_pos_total", "position")
    in_order = [by_position[str(i)] for i in range(len(by_position))]
    assert rounds <= drafted
    assert in_order == sorted(in_order, reverse=True)
    assert in_order[0] <= rounds
    if not now("requests_running") + now("requests_waiting"):
        used_up = drafted + total(now, "draft_unused_total", "reason")
        assert used_up == now("draft_proposed_tokens_total")
        assert used_slots == 0

    # Each round makes one token beside those that stood, unless it ended among these; so does the
    # step that ends a prompt.
    made_rounds = now("round_draft_tokens_count") + now("prefill_seconds_count")
    assert now.by("tokens_total", "kind")["generated"] <= accepted + made_rounds
    assert rounds <= now("round_draft_tokens_count")
    assert drafted <= now("round_draft_tokens_sum")
    assert now("prefill_seconds_count") <= now("queue_seconds_count")
    assert now("queue_seconds_count") <= now("requests_started_total")
    assert now("batch_tokens_count") == now("step_seconds_count") == now("batch_sequences_count")
    assert abs(now("busy_seconds_total") - now("step_seconds_sum")) < 1e-6
    assert now("telemetry_errors_total") == 0

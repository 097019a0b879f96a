"""Frames to a drafter: small enough, complete, and fair between sequences."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict

import pytest

from outrider.params import SamplingParams
from outrider.serving.handshake import MAX_FRAME_BYTES
from target_service.draft_link import MAX_UPDATE_TOKENS, SequenceLink
from target_service.draft_tail import DraftTail, DraftTotals
from target_service.draft_wire import next_frame
from tests.support.target_parts import make_facts

HUGE_SETTINGS = SamplingParams(logit_bias=tuple((2**27 + n, -1.5) for n in range(1024)))


def make_link(sequence_id: int, length: int, sampling: SamplingParams) -> SequenceLink:
    """A sequence that its drafter has not heard of, with large ids."""
    confirmed = [2**27 - n for n in range(length)]
    tail = DraftTail(confirmed, 2**31, 16, DraftTotals())
    link = SequenceLink(sequence_id, confirmed, tail, make_facts(length, sampling))
    link.window = 4
    return link


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_small_and_add_up(seed):
    """Any mix of short, long and richly configured sequences: no frame above 64 KiB, none lost."""
    rng = random.Random(seed)
    dirty: OrderedDict[int, SequenceLink] = OrderedDict()
    lengths = {}
    for sequence_id in range(1, 30):
        lengths[sequence_id] = rng.choice([3, 200, MAX_UPDATE_TOKENS, 3 * MAX_UPDATE_TOKENS + 1])
        sampling = rng.choice([HUGE_SETTINGS, SamplingParams()])
        dirty[sequence_id] = make_link(sequence_id, lengths[sequence_id], sampling)
    received = defaultdict(int)
    num_frames = 0
    while dirty:
        frame = next_frame(dirty, 0.0)
        num_frames += 1
        assert frame.updates
        assert frame.ByteSize() <= MAX_FRAME_BYTES
        ids = [update.sequence_id for update in frame.updates]
        assert len(set(ids)) == len(ids)
        for update in frame.updates:
            assert update.base_len == received[update.sequence_id]
            assert update.HasField("open") == (update.base_len == 0)
            received[update.sequence_id] += len(update.tokens)
    assert received == lengths
    assert num_frames <= sum(lengths.values()) // 2000 + 30


def test_a_long_prefix_does_not_hold_up_a_short_update():
    """While a long prefix is sent frame by frame, everybody else's news goes along."""
    long, short = make_link(1, 100_000, SamplingParams()), make_link(2, 3, SamplingParams())
    next_frame(OrderedDict({2: short}), 0.0)
    short.window = 5
    dirty = OrderedDict({1: long, 2: short})
    frame = next_frame(dirty, 0.0)
    assert [update.sequence_id for update in frame.updates] == [1, 2]
    assert [update.window for update in frame.updates] == [0, 5]


@pytest.mark.parametrize("limit", [1, 300, 20_000])
def test_a_drafter_with_smaller_frames_still_gets_everything(limit):
    """Its limit is kept where it can be, and the prefix arrives in any case."""
    link = make_link(1, 40, SamplingParams())
    dirty = OrderedDict({1: link})
    received = 0
    for _ in range(100):
        if not dirty:
            break
        received += sum(len(update.tokens) for update in next_frame(dirty, 0.0, limit).updates)
    assert received == 40

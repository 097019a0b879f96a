"""Prompt lookup finds what a plain search finds, at the cost of new tokens only."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.proposers.ngram import (
    STEP_TOKENS,
    NgramIndex,
    NgramProposer,
    continuation,
)
from draft_service.sessions import Opening, Session, Update
from outrider.serving.settings import SettingsError


def plain_search(
    confirmed: list[int], token_ids: list[int], shortest: int, longest: int
) -> int | None:
    """Where the longest suffix of `token_ids` occurs last in `confirmed` with a token behind it."""
    for size in range(min(longest, len(token_ids)), shortest - 1, -1):
        suffix = token_ids[-size:]
        for end in range(len(confirmed) - 1, size - 1, -1):
            if confirmed[end - size : end] == suffix:
                return end
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.integers(0, 3), max_size=5),
    st.lists(st.integers(1, 7), max_size=10),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_the_index_finds_what_a_plain_search_finds(
    confirmed: list[int], tail: list[int], cuts: list[int], shortest: int, more: int
) -> None:
    """Whatever the pieces in which tokens came, and whatever the tail behind them."""
    longest = shortest + more
    index = NgramIndex(shortest, longest)
    end = 0
    for cut in [*cuts, len(confirmed)]:
        end = min(len(confirmed), max(end, end + cut))
        index.add(confirmed, end)
    index.add(confirmed, len(confirmed))
    token_ids = confirmed + tail
    assert index.find(token_ids) == plain_search(confirmed, token_ids, shortest, longest)


def test_large_ids_do_not_collide() -> None:
    """n-grams are compared exactly, up to the largest 32-bit id."""
    top = 2**32 - 1
    index = NgramIndex(2, 2)
    tokens = [top, 0, 1, 0, top, 5]
    index.add(tokens, len(tokens))
    assert index.find([top, 0]) == 2
    assert index.find([0, top]) == 5
    assert index.find([top, top]) is None


def test_a_period_is_continued_for_ever() -> None:
    """Behind the end of the text the continuation feeds on itself."""
    assert continuation([7, 1, 2, 1, 2], 3, 7) == [1, 2, 1, 2, 1, 2, 1]


def make_session(tokens: list[int], window: int) -> Session:
    """A sequence with a prefix."""
    session = Session(1, 1, Opening(prompt_len=len(tokens), max_len=100_000))
    session.apply(Update(1, 1, 1, 0, tokens, window))
    return session


async def test_rejected_drafts_leave_nothing_in_the_index() -> None:
    """After a rollback it proposes what a fresh index over the confirmed tokens proposes."""
    proposer = NgramProposer(1, 4)
    session = make_session([1, 2, 3, 4, 1, 2], window=4)
    proposer.open(session)
    await proposer.propose([session])
    assert session.token_ids[6:] == [3, 4, 1, 2]
    session.apply(Update(1, 1, 2, 6, [3, 9, 1, 2], 4))
    await proposer.propose([session])
    assert session.token_ids[10:] == [3, 9, 1, 2]


async def test_nothing_found_is_said_once() -> None:
    """Without a match the session is dry until the next update."""
    proposer = NgramProposer(1, 4)
    session = make_session([1, 2, 3], window=4)
    proposer.open(session)
    assert await proposer.propose([session]) == [session]
    assert session.dry
    assert session.take_unsent().tokens == []
    assert not session.has_unsent


async def test_a_long_context_costs_only_its_new_tokens() -> None:
    """A thousand updates behind 50,000 tokens take no time that grows with the context."""
    proposer = NgramProposer(1, 4)
    tokens = [(i * i) % 9973 for i in range(50_000)]
    session = make_session(tokens, window=4)
    proposer.open(session)
    while not await proposer.propose([session]):
        pass  # it is indexed bit by bit
    started = time.perf_counter()
    for i in range(1000):
        session.apply(Update(1, 1, 2 + i, session.confirmed_len, [i % 7], 4))
        await proposer.propose([session])
    assert time.perf_counter() - started < 1.0


async def test_a_long_text_holds_nobody_up() -> None:
    """It is indexed in pieces, between which the event loop has its turn and others get their
    tokens; it may end in between, and in the end it has what one go would have given it."""
    proposer = NgramProposer(1, 4)
    tokens = [(i * i) % 9973 for i in range(5 * STEP_TOKENS)]
    long, ends = make_session(tokens, window=4), make_session(tokens, window=4)
    proposer.open(long)
    turns: list[int] = []
    steps = 0
    while not long.token_ids[len(tokens) :]:
        short = make_session([1, 2, 1], window=1)
        proposer.open(short)
        asyncio.get_running_loop().call_soon(turns.append, steps)
        changed = await proposer.propose([long, short])
        assert changed == [short, long][: len(changed)]
        assert short.token_ids[3:] == [2]
        steps += 1
    assert steps == 6  # the short ones take some of each step
    assert len(turns) >= steps - 1  # the last one fills no step
    position = plain_search(tokens, tokens, 1, 4)
    assert long.token_ids[len(tokens) :] == continuation(tokens, position, 4)
    proposer.open(ends)
    assert await proposer.propose([ends]) == []
    proposer.close(ends)


def test_a_shortest_above_the_longest_is_refused() -> None:
    """The message names the setting."""
    with pytest.raises(SettingsError, match="ngram_min"):
        NgramProposer(5, 4)

"""DraftTail and SequenceLink against an honest drafter, for every order of events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.params import SamplingParams, VerificationMode
from target_service.draft_link import SequenceFacts, SequenceLink, Update
from target_service.draft_tail import (
    Arrival,
    DraftTail,
    DraftTotals,
    ProposedTokens,
    Unused,
)
from tests.support.honest_drafter import HonestDrafter

MAX_TAIL = 12
FACTS = SequenceFacts(
    prompt_len=3,
    max_len=1000,
    sampling=SamplingParams(),
    partition=b"",
    verification=VerificationMode.EXACT_MATCH,
    min_tokens=0,
    stop_token_ids=(),
)

Guess = Callable[[Sequence[int]], int | None]


class World:
    """A target, a drafter and two wires that keep their order and take as long as they like."""

    def __init__(self, truth: Guess, guess: Guess, vocab_size: int, max_tail: int) -> None:
        self.truth, self.guess, self.max_tail = truth, guess, max_tail
        self.confirmed = [0, 1, 2]
        self.totals = DraftTotals()
        self.tail = DraftTail(self.confirmed, vocab_size, max_tail, self.totals)
        self.drafted = self.accepted = 0
        self.verifying: list[int] | None = None
        self.ended = False
        self.connect()

    def connect(self) -> None:
        """A drafter that knows nothing, on wires that are empty."""
        self.link = SequenceLink(1, self.confirmed, self.tail, FACTS)
        self.drafter = HonestDrafter(self.guess)
        self.updates: deque[Update] = deque()
        self.proposals: deque[ProposedTokens] = deque()

    def act(self, action: str, amount: int) -> None:
        """One event."""
        getattr(self, action)(amount)
        self.check()

    def write(self, window: int) -> None:
        """The target writes what the drafter does not know."""
        self.link.window = window
        if self.link.needs_update:
            self.updates.append(self.link.next_update(0.0))

    def deliver_update(self, _: int) -> None:
        """The drafter reads one update."""
        if self.updates:
            self.drafter.apply(self.updates.popleft())

    def draft(self, amount: int) -> None:
        """The drafter writes a proposal."""
        proposal = self.drafter.draft(amount)
        if proposal is not None:
            self.proposals.append(proposal)

    def deliver_proposal(self, _: int) -> None:
        """The target reads one proposal, in the middle of a step or between two."""
        if self.proposals and not self.ended:
            self.tail.add(self.proposals.popleft())

    def begin(self, k: int) -> None:
        """A step starts to verify up to k drafts."""
        if self.verifying is None and not self.ended:
            self.verifying = self.tail.tokens[:k]
            self.tail.begin_round(len(self.verifying))

    def commit(self, stop_after: int) -> None:
        """The step ends; a large `stop_after` cuts nothing off."""
        if self.verifying is None or self.ended:
            return
        drafts, self.verifying = self.verifying, None
        new: list[int] = []
        for draft in [*drafts, None]:
            new.append(self.truth([*self.confirmed, *new]))
            if draft != new[-1]:
                break
        accepted = len(new) - 1
        drafted = len(drafts)
        stopped = len(new) >= stop_after
        if stopped:
            new = new[:stop_after]
            drafted, accepted = min(drafted, len(new)), min(accepted, len(new))
        self.confirmed.extend(new)
        self.drafted += drafted
        self.accepted += accepted
        self.tail.advance(drafted, len(new))
        if stopped:
            self.finish(0)

    def lose(self, _: int) -> None:
        """The drafter dies and another one takes over."""
        if not self.ended:
            self.tail.restart(Unused.LOST)
            self.connect()

    def evict(self, _: int) -> None:
        """The drafter has forgotten the sequence and says so: the prefix is sent again."""
        if not self.ended:
            self.link.resync(Unused.LOST)

    def finish(self, _: int) -> None:
        """The request ends, perhaps in the middle of a step."""
        if not self.ended:
            self.ended = True
            self.verifying = None
            self.tail.finish()
            self.link.finished = True

    def check(self) -> None:
        """What holds at every moment."""
        unused = sum(self.totals.unused.values())
        assert self.totals.num_proposed == self.drafted + unused + self.tail.num_open
        assert self.totals.unused == self.tail.unused
        assert len(self.tail.tokens) <= self.max_tail
        # An honest drafter never causes a resync, whatever crosses what.
        assert not self.tail.needs_resync
        assert not self.totals.arrivals[Arrival.GAP] + self.totals.arrivals[Arrival.MALFORMED]
        for reason in (Unused.WINDOW, Unused.DUPLICATE, Unused.REPLACED):
            assert not self.totals.unused[reason]
        known = self.drafter.confirmed
        assert known == self.confirmed[: len(known)]
        if self.ended:
            assert self.tail.num_open == 0
            assert self.totals.num_proposed == self.drafted + unused


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, MAX_TAIL)),
        st.tuples(st.just("deliver_update"), st.just(0)),
        st.tuples(st.just("draft"), st.integers(1, MAX_TAIL)),
        st.tuples(st.just("deliver_proposal"), st.just(0)),
        st.tuples(st.just("begin"), st.integers(0, 8)),
        st.tuples(st.just("commit"), st.just(99)),
    ),
    min_size=50,  # else most of them are short, and nothing crosses
    max_size=150,
)
UPSETS = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["lose", "evict"])), max_size=3)
ENDS = st.tuples(st.sampled_from(["finish", "commit"]), st.integers(1, 4))
PERCENT = st.sampled_from([0, 30, 70, 95, 100])


def play(world: World, events: list[tuple[str, int]], upsets: list[tuple[int, str]]) -> None:
    """Run the events, with the upsets at their places."""
    at = dict(upsets)
    for index, (action, amount) in enumerate(events):
        if index in at:
            world.act(at[index], 0)
        world.act(action, amount)


def make_world(seed: int, percent: int, vocab_size: int = 2**61, max_tail: int = MAX_TAIL) -> World:
    """A drafter that guesses `percent` % of the tokens right, and has no idea now and then.

    Tokens are a function of their whole prefix; with a large vocabulary no two prefixes share one.
    """

    def number(prefix: Sequence[int], salt: int) -> int:
        return hash((seed, salt, tuple(prefix))) & (2**61 - 1)

    def truth(prefix: Sequence[int]) -> int:
        return number(prefix, 1) % vocab_size

    def guess(prefix: Sequence[int]) -> int | None:
        luck = number(prefix, 2) % 100
        if luck >= percent:
            return None if luck % 10 == 9 else number(prefix, 3) % vocab_size
        return truth(prefix)

    return World(truth, guess, vocab_size, max_tail)


@given(EVENTS, UPSETS, ENDS, st.integers(0, 2**32), PERCENT)
@settings(max_examples=100, deadline=None)
def test_each_draft_follows_the_tokens_that_it_was_drafted_behind(
    events, upsets, end, seed, percent
):
    """Every tail token was drafted for its position behind exactly the tokens before it now.

    So nothing that was drafted without knowing a token of the target is ever verified, an honest
    drafter is never asked to start again, and every proposed token is accounted for.
    """
    world = make_world(seed, percent)
    behind: dict[int, tuple[int, ...]] = {}
    guess = world.guess

    def remember(prefix: Sequence[int]) -> int | None:
        token = guess(prefix)
        if token is not None:
            behind[token] = tuple(prefix)
        return token

    world.guess = world.drafter._guess = remember
    check = world.check

    def check_origin() -> None:
        check()
        line = [*world.confirmed, *world.tail.tokens]
        for position in range(len(world.confirmed), len(line)):
            assert behind[line[position]] == tuple(line[:position])

    world.check = check_origin
    play(world, events, upsets)
    world.act(*end)
    world.act("finish", 0)


@given(EVENTS, UPSETS, ENDS, st.integers(0, 2**32), PERCENT)
@settings(max_examples=100, deadline=None)
def test_accounts_balance_when_tokens_are_equal_by_chance(events, upsets, end, seed, percent):
    """With two different tokens in all, wrong drafts often look right; the accounts still hold."""
    world = make_world(seed, percent, vocab_size=2)
    play(world, events, upsets)
    world.act(*end)
    world.act("finish", 0)


@given(EVENTS, st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_a_perfect_drafter_is_never_rejected(events, seed):
    """Whatever crosses on the wire, all that is verified is accepted and nothing goes stale."""
    world = make_world(seed, 100)
    play(world, events, [])
    assert world.accepted == world.drafted
    wasted = world.tail.unused.keys() - {Unused.LATE, Unused.TRIMMED}
    assert not wasted


@pytest.mark.parametrize("steps_late", [0, 1, 2, 3])
def test_crossing_frames_cost_nothing(steps_late):
    """With frames that take up to three steps, a perfect drafter still fills every round.

    The window has to cover what is confirmed while a frame is on its way, and nothing more.
    """
    k = 2
    window = (k + 1) * (2 * steps_late + 1) + k
    world = make_world(1, 100, max_tail=window)
    rounds: list[int] = []
    for _ in range(40):
        world.act("write", window)
        if len(world.updates) > steps_late:
            world.act("deliver_update", 0)
        world.act("draft", window)
        while len(world.proposals) > steps_late:
            world.act("deliver_proposal", 0)
        world.act("begin", k)
        rounds.append(len(world.verifying or []))
        world.act("commit", 99)
    assert rounds[2 * steps_late + 1 :] == [k] * (39 - 2 * steps_late)
    assert world.accepted == world.drafted

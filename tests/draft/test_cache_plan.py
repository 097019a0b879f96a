"""The model proposer's bookkeeping, run without a model on a cache that remembers what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.proposers.cache_plan import CachePlan, Share
from draft_service.sessions import Opening, Session, Update
from outrider.engine.block_pool import BlockPool

BLOCK = 4


@dataclass
class FakeCache:
    """Slots that hold the text up to and with their token, as keys and values do in effect."""

    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def forward(self, share: Share, token_ids: list[int]) -> None:
        """Write the share's tokens and check that it attends to its own text and nothing else."""
        item = share.item
        assert item.token_ids == token_ids[item.start : item.end]
        for position in range(item.start, item.end):
            self.slots[self._slot(share, position)] = tuple(token_ids[: position + 1])
        for position in range(item.end):
            assert self.slots[self._slot(share, position)] == tuple(token_ids[: position + 1])

    def _slot(self, share: Share, position: int) -> int:
        return share.item.block_table[position // BLOCK] * BLOCK + position % BLOCK


class Bench:
    """A plan with its sessions; one step runs at a time, and things may happen while it runs."""

    def __init__(self, num_blocks: int, step_tokens: int = 64) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.plan = CachePlan(self.pool, step_tokens, vocab_size=1000)
        self.cache = FakeCache()
        self.sessions: list[Session] = []
        self.clock = 0.0
        self.same_frame = False
        """Updates come with the time of the one before."""
        self.running: list[Share] = []

    def open(self, tokens: list[int], window: int, max_len: int = 10_000) -> Session:
        """A new sequence with its prefix."""
        session = Session(len(self.sessions), 1, Opening(len(tokens), max_len))
        self.sessions.append(session)
        self.plan.open(session)
        self.update(session, tokens, window)
        return session

    def update(self, session: Session, tokens: list[int], window: int) -> None:
        """The target confirms."""
        if not self.same_frame:
            self.clock += 1
        session.apply(
            Update(session.sequence_id, 1, 1, session.confirmed_len, tokens, window,
                   received_s=self.clock)
        )  # fmt: skip

    def close(self, session: Session) -> None:
        """The sequence ends."""
        session.closed = True
        self.sessions.remove(session)
        self.plan.close(session)

    def start_step(self) -> list[Share]:
        """Plan, and run on the cache."""
        wanting = [each for each in self.sessions if each.wants_tokens]
        self.running = self.plan.plan(wanting)
        assert bool(self.running) == bool(wanting), "somebody always moves"
        for share in self.running:
            self.cache.forward(share, list(share.session.token_ids))
        return self.running

    def end_step(self, token: int = 7) -> None:
        """Commit; every choice is `token`."""
        for share in self.running:
            if self.plan.commit(share):
                assert share.tokens_before == share.session.token_ids, "chosen for another text"
                share.session.extend([token], [-1.0])
        self.running = []
        self.check()

    def check(self) -> None:
        """The pool is whole."""
        report = self.plan.report()
        assert report.integrity_errors == ()
        assert report.free == self.pool.num_free
        assert report.wasted_slots >= 0


def test_a_long_prefix_does_not_stall_the_others() -> None:
    """Short sequences get a token in each step while a long one is computed in chunks."""
    bench = Bench(num_blocks=200, step_tokens=64)
    short = [bench.open([i, i + 1], window=16) for i in range(4)]
    bench.start_step()
    bench.end_step()
    long = bench.open(list(range(300)), window=2)
    bench.update(short[0], [], 16)
    steps = 0
    while len(long.token_ids) == 300:
        shares = bench.start_step()
        assert {share.session for share in shares} == {*short, long}
        assert sum(len(share.item.token_ids) for share in shares) <= 64
        bench.end_step()
        steps += 1
    assert steps == 5
    assert all(len(each.token_ids) == 8 for each in short)


def test_window_zero_computes_nothing_and_one_chunk_catches_up() -> None:
    """Ids that came without a window are forwarded together when drafting starts again."""
    bench = Bench(num_blocks=20)
    session = bench.open([1, 2], window=2)
    bench.start_step()
    bench.end_step()
    bench.update(session, [3, 4], window=0)
    bench.update(session, [5, 6], window=0)
    assert bench.plan.plan([]) == []
    bench.update(session, [], window=2)
    (share,) = bench.start_step()
    assert (share.item.start, share.item.token_ids) == (2, [3, 4, 5, 6])


def test_rollback_keeps_what_agrees_and_frees_the_rest() -> None:
    """Only tokens from the first difference on are forwarded again, and their blocks given back."""
    bench = Bench(num_blocks=20)
    session = bench.open([1, 2], window=12)
    for _ in range(12):
        bench.start_step()
        bench.end_step()
    assert bench.pool.num_used == 4
    bench.update(session, [7, 9], window=1)
    (share,) = bench.start_step()
    assert (share.item.start, share.item.token_ids) == (3, [9])
    assert bench.pool.num_used == 1


def test_blocks_come_from_idle_sequences_first() -> None:
    """The least recently used idle one is computed again when its turn comes; nobody is lost."""
    bench = Bench(num_blocks=6)
    first = bench.open([1] * 8, window=1)
    second = bench.open([2] * 8, window=1)
    bench.start_step()
    bench.end_step()
    assert bench.pool.num_free == 2
    third = bench.open([3] * 16, window=1)
    bench.start_step()
    bench.end_step()
    assert len(third.token_ids) == 17
    bench.update(second, [], window=2)
    (share,) = bench.start_step()
    assert share.item.start == 8, "the second kept its blocks"
    bench.end_step()
    bench.update(first, [], window=2)
    (share,) = bench.start_step()
    assert share.item.start == 0


def test_two_that_do_not_fit_together_both_go_on() -> None:
    """The one with the older update moves; each update makes its sequence the younger one."""
    bench = Bench(num_blocks=6)
    left = bench.open([1] * 12, window=3)
    right = bench.open([2] * 12, window=3)
    for _ in range(20):
        if not any(each.wants_tokens for each in bench.sessions):
            break
        bench.start_step()
        bench.end_step()
    assert (len(left.token_ids), len(right.token_ids)) == (15, 15)


def test_updates_of_one_frame_do_not_block_each_other() -> None:
    """Two that stand at the end of their last blocks in a full pool, their updates read at the same
    time: the one that was opened first takes the other's blocks, and then the other has its turn.
    """
    bench = Bench(num_blocks=4)
    pair = [bench.open([i] * (2 * BLOCK - 1), window=3) for i in (1, 2)]
    for session in pair:
        session.received_s = 1.0
    for _ in range(12):
        if not any(each.wants_tokens for each in pair):
            break
        bench.start_step()
        bench.end_step()
    assert [len(each.token_ids) for each in pair] == [2 * BLOCK + 2] * 2


def test_ids_that_the_model_does_not_have_are_replaced() -> None:
    """A target whose table is padded further may confirm ids above ours."""
    plan = CachePlan(BlockPool(4, BLOCK), 64, vocab_size=10)
    session = Session(1, 1, Opening(2, 100, vocab_size=20))
    plan.open(session)
    session.apply(Update(1, 1, 1, 0, [9, 10, 19], 2))
    (share,) = plan.plan([session])
    assert share.item.token_ids == share.tokens_before == [9, 0, 0]


def test_a_window_that_closed_during_a_step_costs_only_the_last_token() -> None:
    """The choice that had no place any more is made again from the last token."""
    bench = Bench(num_blocks=20)
    session = bench.open([1, 2, 3], window=2)
    bench.start_step()
    bench.update(session, [], window=0)
    bench.end_step()
    assert session.token_ids == [1, 2, 3]
    bench.update(session, [], window=1)
    (share,) = bench.start_step()
    assert (share.item.start, share.item.token_ids) == (2, [3])


index = st.integers(0, 9)
opening = st.tuples(st.just("open"), st.integers(1, 40), st.integers(1, 6))
start = st.tuples(st.just("start"))
end = st.tuples(st.just("end"), st.integers(0, 2))
confirm = st.tuples(st.just("confirm"), index, st.integers(0, 3), st.integers(0, 4))
other = st.one_of(
    st.tuples(st.just("window"), index, st.integers(0, 6)),
    st.tuples(st.just("close"), index),
    st.tuples(st.just("frame"), st.booleans()),
)
# A few whole steps, some with an update that arrives meanwhile; single events seldom make these.
steps = st.lists(st.tuples(start, end), min_size=1, max_size=4).map(lambda all: sum(all, ()))
crossed = st.tuples(start, confirm, end)
histories = st.lists(
    st.one_of(
        steps, crossed, st.one_of(opening, start, end, confirm, other).map(lambda event: (event,))
    ),
    max_size=25,
).map(lambda groups: [("open", 3, 6), *(event for group in groups for event in group)])


@settings(max_examples=300, deadline=None)
@given(histories, st.integers(14, 40), st.sampled_from([40, 64, 512]))
def test_every_step_attends_to_the_right_text(
    history: list[tuple], num_blocks: int, step_tokens: int
) -> None:
    """Whatever comes between and during steps: slots hold the sequence's own present text, the
    pool is whole, somebody always moves, and at the end every block is free."""
    bench = Bench(num_blocks, step_tokens)
    for kind, *args in history:
        if kind == "open":
            length, window = args
            bench.open([length % 5] * length, window, max_len=num_blocks * BLOCK)
        elif kind == "start" and not bench.running:
            bench.start_step()
        elif kind == "end":
            bench.end_step(token=args[0])
        elif kind == "frame":
            bench.same_frame = args[0]
        elif kind in ("confirm", "window", "close") and bench.sessions:
            session = bench.sessions[args[0] % len(bench.sessions)]
            if kind == "close":
                bench.close(session)
            elif kind == "window":
                bench.update(session, [], args[1])
            else:
                follow, other = args[1:]
                agreed = session.token_ids[session.confirmed_len :][:follow]
                tokens = agreed + [1] * other
                if session.confirmed_len + len(tokens) <= num_blocks * BLOCK:
                    bench.update(session, tokens, session.window)
        bench.check()
    bench.end_step()
    for session in list(bench.sessions):
        bench.close(session)
    assert bench.pool.num_used == 0

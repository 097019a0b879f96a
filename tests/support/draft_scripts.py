"""What a scripted drafter says: token sources, and behaviours that can be put into each other.

A *token source* knows which tokens to propose for a sequence. A *behaviour* turns an update into
replies. `Drafting` is the honest one: it keeps a tail, compares it with what is confirmed and sends
each new token once. The others replace it or bend what it says:

    Drafting(Perfect(known))                      proposes exactly the known output
    Drafting(Wrong(known))                        never a token that the target picks
    Drafting(Partial(known, right=3))             three right ones, then wrong ones
    Drafting(Perfect(known), lengths=[2, 0, 5])   at most that many tokens a round, in turn
    Empty()                                       "nothing to propose", at once
    Mute()                                        takes everything, says nothing
    Late(behaviour, seconds, every=3)             each third answer comes late
    Crossing(behaviour, updates=2)                each answer waits for two further updates
    Junk() or Junk(JUNK["huge_start"])            malformed answers, one kind after another
    Closing(behaviour, rounds=4, code=...)        ends the stream at the fourth update
    Going(behaviour, rounds=4, reason=...)        says SequenceGone at a sequence's fourth update

`known` maps a prompt (tuple of ids) to the ids that the target generates for it, or is a function
of the ScriptedSequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import grpc

from protos.outrider.v1 import draft_pb2

Known = Mapping[tuple[int, ...], Sequence[int]] | Callable[["ScriptedSequence"], Sequence[int]]


@dataclass(eq=False, slots=True)
class ScriptedSequence:
    """What the drafter has been told of one sequence; a new epoch starts it anew."""

    sequence_id: int
    epoch: int
    opening: draft_pb2.SequenceOpen
    confirmed: list[int] = field(default_factory=list)
    window: int = 0
    update_seq: int = 0
    updates: int = 0

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's ids, as far as they have come."""
        return tuple(self.confirmed[: self.opening.prompt_len])

    @property
    def limit(self) -> int:
        """The length up to which proposals may reach."""
        return min(len(self.confirmed) + self.window, self.opening.max_len)

    def proposal(self, start: int, tokens: Sequence[int], **changes: int) -> draft_pb2.Proposal:
        """An honest proposal, but for `changes`."""
        fields = {
            "sequence_id": self.sequence_id,
            "epoch": self.epoch,
            "update_seq": self.update_seq,
            "seen_len": len(self.confirmed),
            "start": start,
        }
        return draft_pb2.Proposal(tokens=tokens, **(fields | changes))


@dataclass(frozen=True, slots=True)
class Reply:
    """One frame, and when it goes out; or the end of the stream."""

    frame: draft_pb2.SpeculateResponse | None = None
    delay_s: float = 0.0
    hold_updates: int = 0
    """Further updates of the same sequence that must arrive first."""
    close: tuple[grpc.StatusCode, str] | None = None


class Behaviour(Protocol):
    """Answers updates. One object serves all streams of a drafter."""

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        """Replies to the update that has just been applied to `sequence`."""


class TokenSource(Protocol):
    """Knows what to propose."""

    def token(self, sequence: ScriptedSequence, position: int, offset: int) -> int | None:
        """The token for an absolute position, `offset` behind where the tail was begun."""


@dataclass(frozen=True)
class Perfect:
    """The known output; behind its end `then`, over and over, or nothing."""

    known: Known
    then: Sequence[int] = ()

    def token(self, sequence: ScriptedSequence, position: int, offset: int) -> int | None:
        output = look_up(self.known, sequence)
        index = position - sequence.opening.prompt_len
        if index < len(output):
            return output[index]
        return self.then[(index - len(output)) % len(self.then)] if self.then else None


@dataclass(frozen=True)
class Partial:
    """`right` right tokens from where the tail begins, then only wrong ones."""

    known: Known
    right: int
    vocab_size: int

    def token(self, sequence: ScriptedSequence, position: int, offset: int) -> int | None:
        right = Perfect(self.known).token(sequence, position, offset)
        if right is None or offset < self.right:
            return right
        return (right + 1) % self.vocab_size


class Wrong(Partial):
    """Nothing that the target would pick."""

    def __init__(self, known: Known, vocab_size: int) -> None:
        super().__init__(known, 0, vocab_size)


@dataclass(frozen=True)
class Always:
    """The same token everywhere, for instance an end-of-sequence id that comes too early."""

    token_id: int

    def token(self, sequence: ScriptedSequence, position: int, offset: int) -> int | None:
        return self.token_id


def look_up(known: Known, sequence: ScriptedSequence) -> Sequence[int]:
    """The known output of a sequence; none for an unknown prompt."""
    return known(sequence) if callable(known) else known.get(sequence.prompt, ())


class Drafting:
    """Keeps a tail for each sequence, as a real drafter does, and fills the window."""

    def __init__(
        self,
        source: TokenSource,
        lengths: Sequence[int] | Callable[[ScriptedSequence], int] | None = None,
    ) -> None:
        self._source = source
        self._lengths = lengths
        self._tails: dict[ScriptedSequence, tuple[int, list[int]]] = {}  # begin, tokens

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        if sequence.window == 0:
            return []
        confirmed = sequence.confirmed
        begin, tail = self._tails.get(sequence, (len(confirmed), []))
        seen = confirmed[begin:]
        if tail[: len(seen)] != seen[: len(tail)] or len(seen) > len(tail):
            begin, tail = len(confirmed), []
        start = begin + len(tail)
        end = sequence.limit
        if callable(self._lengths):
            end = min(end, len(confirmed) + self._lengths(sequence))
        elif self._lengths is not None:
            length = self._lengths[(sequence.updates - 1) % len(self._lengths)]
            end = min(end, len(confirmed) + length)
        fresh: list[int] = []
        for position in range(start, end):
            token = self._source.token(sequence, position, position - begin)
            if token is None:
                break
            fresh.append(token)
        self._tails[sequence] = (begin, tail + fresh)
        frame = draft_pb2.SpeculateResponse()
        if fresh:
            frame.proposals.append(sequence.proposal(start, fresh))
        if start + len(fresh) < len(confirmed) + sequence.window:
            frame.proposals.append(sequence.proposal(start + len(fresh), []))
        return [Reply(frame)] if frame.proposals else []


class Empty:
    """Says at once that it has nothing to propose."""

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        if sequence.window == 0:
            return []
        empty = sequence.proposal(len(sequence.confirmed), [])
        return [Reply(draft_pb2.SpeculateResponse(proposals=[empty]))]


class Mute:
    """Never answers an update."""

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        return []


class Late:
    """Delays answers; the order of a sequence's answers stays."""

    def __init__(
        self,
        behaviour: Behaviour,
        delay: float | Callable[[ScriptedSequence], float],
        every: int = 1,
    ) -> None:
        self._behaviour = behaviour
        self._delay = delay
        self._every = every
        self._answers = 0

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        replies = self._behaviour.answer(sequence)
        if not replies:
            return []
        self._answers += 1
        if self._answers % self._every:
            return replies
        delay_s = self._delay(sequence) if callable(self._delay) else self._delay
        return [replace(reply, delay_s=reply.delay_s + delay_s) for reply in replies]


class Crossing:
    """Makes every answer cross the sequence's next updates on the wire."""

    def __init__(self, behaviour: Behaviour, updates: int) -> None:
        self._behaviour = behaviour
        self._updates = updates

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        replies = self._behaviour.answer(sequence)
        return [replace(reply, hold_updates=self._updates) for reply in replies]


class Closing:
    """Ends the stream at the `rounds`-th update that asks for tokens, over all sequences."""

    def __init__(
        self,
        behaviour: Behaviour,
        rounds: int,
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
        *,
        repeat: bool = True,
    ) -> None:
        self._behaviour = behaviour
        self._rounds = rounds
        self._code = code
        self._repeat = repeat
        self._asked = 0

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        self._asked += sequence.window > 0
        due = self._asked % self._rounds == 0 if self._repeat else self._asked == self._rounds
        if sequence.window and due:
            return [Reply(close=(self._code, "closed by the script"))]
        return self._behaviour.answer(sequence)


class Going:
    """Says SequenceGone at the `rounds`-th update of each sequence, in its first epoch or all."""

    def __init__(
        self,
        behaviour: Behaviour,
        rounds: int,
        reason: draft_pb2.SequenceGone.Reason = draft_pb2.SequenceGone.REASON_EVICTED,
        *,
        every_epoch: bool = False,
    ) -> None:
        self._behaviour = behaviour
        self._rounds = rounds
        self._reason = reason
        self._every_epoch = every_epoch
        self._gone: Counter[int] = Counter()

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        again = self._every_epoch or not self._gone[sequence.sequence_id]
        if sequence.updates == self._rounds and again:
            self._gone[sequence.sequence_id] += 1
            gone = draft_pb2.SequenceGone(
                sequence_id=sequence.sequence_id, epoch=sequence.epoch, reason=self._reason
            )
            return [Reply(draft_pb2.SpeculateResponse(gone=[gone]))]
        return self._behaviour.answer(sequence)


MakeJunk = Callable[[ScriptedSequence], draft_pb2.SpeculateResponse]


def _with(sequence: ScriptedSequence, count: int, **changes: int) -> draft_pb2.SpeculateResponse:
    start = changes.pop("start", len(sequence.confirmed))
    proposal = sequence.proposal(start, [1] * count, **changes)
    return draft_pb2.SpeculateResponse(proposals=[proposal])


def _tokens(sequence: ScriptedSequence, *tokens: int) -> draft_pb2.SpeculateResponse:
    proposal = sequence.proposal(len(sequence.confirmed), tokens)
    return draft_pb2.SpeculateResponse(proposals=[proposal])


def _bad_logprobs(sequence: ScriptedSequence) -> draft_pb2.SpeculateResponse:
    frame = _with(sequence, 3)
    frame.proposals[0].logprobs.extend([float("nan"), 7.0])
    return frame


def _gone(sequence: ScriptedSequence, **changes: int) -> draft_pb2.SpeculateResponse:
    fields = {"sequence_id": sequence.sequence_id, "epoch": sequence.epoch} | changes
    return draft_pb2.SpeculateResponse(gone=[draft_pb2.SequenceGone(**fields)])


JUNK: dict[str, MakeJunk] = {
    "id_above_vocab": lambda s: _tokens(s, 1, 10_000_000),
    "largest_int32_id": lambda s: _tokens(s, 2**31 - 1),
    "largest_uint32_id": lambda s: _tokens(s, 2**32 - 1),
    "huge_start": lambda s: _with(s, 2, start=2**32 - 2),
    "start_past_tail": lambda s: _with(s, 2, start=len(s.confirmed) + s.window + 5),
    "start_in_confirmed": lambda s: _with(s, 2, start=max(0, len(s.confirmed) - 2)),
    "start_zero": lambda s: _with(s, 2, start=0),
    "seen_len_ahead": lambda s: _with(s, 2, seen_len=len(s.confirmed) + 100),
    "epoch_ahead": lambda s: _with(s, 2, epoch=s.epoch + 7),
    "epoch_behind": lambda s: _with(s, 2, epoch=max(0, s.epoch - 1)),
    "unknown_sequence": lambda s: _with(s, 2, sequence_id=2**63 + 11),
    "update_seq_ahead": lambda s: _with(s, 0, update_seq=2**32 - 1),
    "beyond_window": lambda s: _with(s, s.window + 200),
    "oversized": lambda s: _with(s, 80_000),
    "bad_logprobs": _bad_logprobs,
    "second_hello": lambda s: draft_pb2.SpeculateResponse(
        hello=draft_pb2.Hello(instance_id="again", token_table_hash=b"other")
    ),
    "empty_frame": lambda s: draft_pb2.SpeculateResponse(),
    "gone_unknown_sequence": lambda s: _gone(s, sequence_id=2**63 + 11),
    "gone_other_epoch": lambda s: _gone(s, epoch=s.epoch + 7),
    "gone_reason_unknown": lambda s: _gone(s, reason=99),
}
"""Malformed answers by name. The target must go on as if it had not got them."""


class Junk:
    """Answers every update that asks for tokens with junk, all kinds in turn."""

    def __init__(self, *kinds: MakeJunk) -> None:
        self._kinds = kinds or tuple(JUNK.values())
        self._answers = 0

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        if sequence.window == 0:
            return []
        make = self._kinds[self._answers % len(self._kinds)]
        self._answers += 1
        return [Reply(make(sequence))]

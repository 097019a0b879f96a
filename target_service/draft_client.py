"""One drafter: a connection that comes and goes, and the sequences that use it.

The batcher only marks what has changed; a writer task turns that into frames, and a reader task
feeds what comes back into the tails. Nothing here ever makes a step wait or fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from outrider.engine.sparse_probs import SparseProbs
from outrider.params import VerificationMode
from outrider.serving.channel import open_channel
from outrider.serving.errors import Incompatible
from outrider.serving.refusals import explain_refusal
from outrider.serving.tls import ClientTls
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2
from target_service.draft_link import SequenceFacts, SequenceLink
from target_service.draft_silence import Silence
from target_service.draft_stream import LISTEN_S, explain, hides_status, pump, shake_hands
from target_service.draft_tail import DraftTail, DraftTotals, ProposedTokens, Unused
from target_service.draft_wire import next_frame, sparse_probs_from_proto
from target_service.observer import Observer

log = structlog.get_logger(__name__)

_BACKOFF_S = (0.25, 2.5)
_REFUSED_BACKOFF_S = 8.0
"""Pause after an answer that trying again cannot change, unless the drafter is replaced."""
_FREE_RESYNCS = 2
"""Of one sequence, since a proposal of the drafter was last of use; each costs a whole prefix."""
_RESYNC_PAUSE_S = 0.03
"""Doubled with each further one, up to 2 s."""
_IMPOSSIBLE = 2**32


FRAME_KINDS = ("finished", "unknown_sequence", "unexpected_hello", "stale_gone", "resync", "crash")
"""What frames are counted as, beside what becomes of proposals."""


class DraftClient:
    """The target's end of one `Speculate` stream after another to one address."""

    def __init__(
        self,
        address: str,
        hello: draft_pb2.Hello,
        *,
        on_arrival: Callable[[], None],
        on_ready: Callable[[], None],
        on_lost: Callable[[list[int]], None],
        on_refused: Callable[[int], None],
        totals: DraftTotals,
        observer: Observer | None = None,
        tls: ClientTls | None = None,
        server_name: str = "",
    ) -> None:
        """tls, server_name: as of `open_channel`."""
        self.address = address
        self.state = "connecting"
        self.reason = "not connected yet"
        self.peer = draft_pb2.Hello()
        self.load = target_pb2.DrafterLoad()
        self.connect_attempts = 0
        self.round_trip_s = 0.0
        self.frames: Counter[str] = Counter()
        self._hello = hello
        self._on_arrival, self._on_ready, self._on_lost = on_arrival, on_ready, on_lost
        self._on_refused = on_refused
        self._totals = totals
        self._observer = observer or Observer()
        self._tls, self._server_name = tls, server_name
        self._links: dict[int, SequenceLink] = {}
        self._dirty: OrderedDict[int, SequenceLink] = OrderedDict()
        self._wake_writer = asyncio.Event()
        self._silence = Silence()
        self._next_id = 0
        self._was_ready = False
        self._logged_reason = ""
        self._listen_s = LISTEN_S[0]
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Connected and through with the handshake."""
        return self.state == "ready"

    @property
    def responsive(self) -> bool:
        """Ready, and not silent for long while it was asked for something."""
        return self.ready and not self._silence.lasts

    @property
    def may_be_asked(self) -> bool:
        """Responsive, or silent for so long that it is worth another try."""
        return self.ready and (not self._silence.lasts or self._silence.forgiven)

    @property
    def num_sequences(self) -> int:
        """Sequences that use this drafter."""
        return len(self._links)

    def start(self) -> None:
        """Begin to connect, and go on for ever."""
        self._task = asyncio.create_task(self._keep_connected(), name=f"drafter {self.address}")

    async def stop(self) -> None:
        """Hang up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def open(self, confirmed: list[int], tail: DraftTail, facts: SequenceFacts) -> int:
        """Tell the drafter of a sequence. The id is good until the stream is lost."""
        self._next_id += 1
        self._links[self._next_id] = SequenceLink(self._next_id, confirmed, tail, facts)
        self.mark(self._next_id, window=0)
        return self._next_id

    def mark(self, sequence_id: int, window: int) -> None:
        """The sequence has new confirmed tokens, or wants another window."""
        link = self._links[sequence_id]
        if link.tail.needs_resync:
            self._resync(link, Unused.GAP)
        link.window = min(window, self.peer.limits.max_window or window)
        if link.needs_update:
            self._dirty[sequence_id] = link
            self._wake_writer.set()

    def close(self, sequence_id: int) -> None:
        """The sequence has ended; the drafter forgets it."""
        link = self._links.pop(sequence_id, None)
        self._silence.released(sequence_id)
        if link is not None:
            link.finished = True
            if link.needs_update:
                self._dirty[sequence_id] = link
                self._wake_writer.set()
            else:
                self._dirty.pop(sequence_id, None)

    def granted(self, sequence_id: int) -> int:
        """Drafts of this sequence that a step may hope for; this drafter's own limit counts."""
        link = self._links[sequence_id]
        hopeless = link.refused or link.held_back or not self.responsive
        return 0 if hopeless or self._silence.makes_waiting_vain else link.window

    def note_vain_wait(self) -> None:
        """A step waited to its deadline: see `Silence`."""
        self._silence.note_vain_wait()

    async def _keep_connected(self) -> None:
        low, high = _BACKOFF_S
        backoff = low
        while True:
            self.state, self.reason = "connecting", self.reason or "connecting"
            self.connect_attempts += 1
            try:
                await self._connected()
                self.reason = "the drafter ended the stream"
            except (grpc.aio.AioRpcError, Incompatible, TimeoutError, ValueError) as error:
                if hides_status(error) and self._listen_s == LISTEN_S[0]:
                    self._listen_s = LISTEN_S[1]
                    continue
                self._note_failure(error)
            except Exception as error:  # a fault of ours must not end the connecting for ever
                self.frames["crash"] += 1
                log.error("drafter connection failed", address=self.address, exc_info=error)
                self._note_failure(error)
            self._listen_s = LISTEN_S[0]
            if self._was_ready:
                backoff = low
            if self.state == "refused":
                pause = _REFUSED_BACKOFF_S * random.uniform(0.75, 1.25)
            else:
                # All targets lose a drafter at the same moment and must not come back as one.
                pause = backoff * random.uniform(0.5, 1.5)
            backoff = min(high, backoff * 2)
            await asyncio.sleep(pause)

    def _note_failure(self, error: Exception) -> None:
        self.reason, permanent = explain(error)
        if isinstance(error, grpc.aio.AioRpcError):
            refusal = explain_refusal(error.details() or "", self._tls, self._server_name)
            self.reason = f"{error.code().name}: {refusal}" if refusal else self.reason
        self.state = "refused" if permanent else "backoff"
        if self.reason != self._logged_reason:  # not at every attempt
            self._logged_reason = self.reason
            log.warning("drafter unused", address=self.address, reason=self.reason)

    async def _connected(self) -> None:
        """One stream, from its Hello to its end."""
        self._was_ready = False
        channel = open_channel(
            self.address, tries_again=False, tls=self._tls, server_name=self._server_name
        )
        async with channel:
            stream = draft_pb2_grpc.DraftStub(channel).Speculate()
            try:
                self.peer = await shake_hands(stream, self._hello, self._listen_s)
                self._was_ready = True
                warning = self._warning()
                self.state, self.reason = "ready", warning
                self._logged_reason = ""
                known = {"address": self.address, "instance": self.peer.instance_id}
                log.info("drafter ready", **known, **({"warning": warning} if warning else {}))
                self._on_ready()
                await pump(stream, self._frames(), self._take_in)
            finally:
                stream.cancel()
                self._lose_sequences()

    def _warning(self) -> str:
        """What an operator should know of a drafter that works; empty if there is nothing."""
        theirs, ours = self.peer.noise_version, self._hello.noise_version
        if self.peer.weights_fingerprint and theirs != ours:
            return f"its noise has version {theirs}, ours {ours}: sampled drafts guess badly"
        return ""

    async def _frames(self) -> AsyncIterator[draft_pb2.SpeculateRequest]:
        while True:
            await self._wake_writer.wait()
            self._wake_writer.clear()
            while self._dirty:
                yield self._next_frame()

    def _next_frame(self) -> draft_pb2.SpeculateRequest:
        now = time.monotonic()
        frame = next_frame(self._dirty, now, self.peer.limits.max_frame_bytes)
        for update in frame.updates:
            if update.window:
                self._silence.asked(update.sequence_id, now)
            else:
                self._silence.released(update.sequence_id)
            if not update.finished:
                self._observer.window(update.window)
        return frame

    def _take_in(self, response: draft_pb2.SpeculateResponse) -> None:
        self._silence.heard()
        if response.HasField("load"):
            self.load = response.load
        if response.HasField("hello"):
            self.frames["unexpected_hello"] += 1
        for proposal in response.proposals:
            self._take_proposal(proposal)
        for gone in response.gone:
            self._take_gone(gone)
        if response.proposals or response.gone:
            self._on_arrival()

    def _take_proposal(self, proposal: draft_pb2.Proposal) -> None:
        link = self._links.get(proposal.sequence_id)
        if link is None:
            known = proposal.sequence_id <= self._next_id
            self.frames["finished" if known else "unknown_sequence"] += 1
            self._totals.num_proposed += len(proposal.tokens)
            reason = Unused.FINISHED if known else Unused.MALFORMED
            self._totals.unused[reason] += len(proposal.tokens)
            return
        self._note_timing(link, proposal)
        mismatched = proposal.logprobs and len(proposal.logprobs) != len(proposal.tokens)
        # An impossible seen_len makes the tail refuse it as malformed.
        seen_len = _IMPOSSIBLE if mismatched else proposal.seen_len
        probs: list[SparseProbs | None] = []
        if link.facts.verification is VerificationMode.REJECTION:
            meant = proposal.sparse_probs[: len(proposal.tokens)]
            probs = [sparse_probs_from_proto(each) for each in meant]
        link.tail.add(
            ProposedTokens(proposal.epoch, seen_len, proposal.start, proposal.tokens, probs)
        )
        if link.tail.needs_resync:
            self._resync(link, Unused.GAP)
        elif link.tail.exhausted or (link.tail.tokens and not link.tail.settled):
            link.num_resyncs = 0

    def _take_gone(self, gone: draft_pb2.SequenceGone) -> None:
        link = self._links.get(gone.sequence_id)
        if link is None or gone.epoch != link.tail.epoch:
            self.frames["stale_gone"] += 1
            return
        if gone.reason in (draft_pb2.SequenceGone.REASON_FULL, gone.REASON_TOO_LONG):
            link.refused = True
            link.tail.discard(Unused.LOST)
            self._on_refused(gone.sequence_id)
        else:
            self._resync(link, Unused.LOST)

    def _resync(self, link: SequenceLink, reason: Unused) -> None:
        """Send the prefix again; with growing pauses to a drafter that needs it every time."""
        self.frames["resync"] += 1
        link.resync(reason)
        link.num_resyncs += 1
        pause = _RESYNC_PAUSE_S * 2 ** min(link.num_resyncs - _FREE_RESYNCS, 6)
        if link.num_resyncs <= _FREE_RESYNCS:
            self._release(link)
        else:
            link.held_back = True
            self._dirty.pop(link.sequence_id, None)
            asyncio.get_running_loop().call_later(pause, self._release, link)

    def _release(self, link: SequenceLink) -> None:
        link.held_back = False
        if self._links.get(link.sequence_id) is link and link.needs_update:
            self._dirty[link.sequence_id] = link
            self._wake_writer.set()

    def _note_timing(self, link: SequenceLink, proposal: draft_pb2.Proposal) -> None:
        sent = link.take_sent_at(proposal.update_seq)
        if sent is not None:
            trip = max(0.0, time.monotonic() - sent - proposal.held_us / 1e6)
            self._observer.round_trip(trip)
            old = self.round_trip_s
            self.round_trip_s = trip if old == 0 else 0.9 * old + 0.1 * trip

    def _lose_sequences(self) -> None:
        lost = list(self._links)
        for link in self._links.values():
            link.tail.restart(Unused.LOST)
        self._links.clear()
        self._dirty.clear()
        self._silence = Silence()
        if self.state == "ready":
            self.state = "backoff"
        if lost:
            self._on_lost(lost)

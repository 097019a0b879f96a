"""How long a step waits for drafts, and for whom it does not wait at all.

Between two steps the batcher asks: who wants drafts, has it got them, may more still come? The
answers come from the window controllers and the hub; the waiting happens here. Nobody waits for
another's drafts longer than its own limit says, and a FIXED request, which waits long, sits out
steps rather than hold them up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence, Sized

from outrider.params import SpeculationMode
from target_service.draft_hub import DraftHub
from target_service.request import Request
from target_service.window import NO_DRAFTS, Round, Wish


class DraftGate:
    """What running requests wish for their next round, and since when."""

    def __init__(self, hub: DraftHub, arrived: asyncio.Event) -> None:
        self.waited_s = 0.0
        """Seconds that steps waited, since the start."""
        self._hub = hub
        self._arrived = arrived
        self._open: set[Request] = set()
        self._wishes: dict[Request, Wish] = {}
        self._since: dict[Request, float] = {}
        self._sitting_out: set[Request] = set()
        self._deadlines: dict[Request, float] = {}

    def nudge(self) -> None:
        """Something has changed that may end a wait."""
        self._arrived.set()

    async def wait(
        self, running: Sequence[Request], waiting: Sized = (), *, may_sit_out: bool = True
    ) -> None:
        """Return when a step should start; those in `waiting` would join it."""
        started = time.monotonic()
        ready = [request for request in running if not request.output.full]
        self._wish(ready, started)
        lacking = {each for each in self._wishes if self._lacks(each)}
        share = len(lacking) / max(1, len(ready))
        self._deadlines = {
            each: self._since[each] + each.window.wait_s(self._wishes[each], share)
            for each in lacking
        }
        lacking = self._still_lacking(lacking)
        while lacking:
            others = len(waiting) > 0 or any(each not in lacking for each in ready)
            if may_sit_out and others and all(map(_is_fixed, lacking)):
                break
            deadline = min(self._deadlines[request] for request in lacking)
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._arrived.wait()
            lacking = self._still_lacking(lacking)
        self._sitting_out = lacking
        self.waited_s += time.monotonic() - started

    @property
    def anybody_sits_out(self) -> bool:
        """Somebody waits for drafts while others step."""
        return bool(self._sitting_out)

    def open(self, request: Request) -> None:
        """The request has begun to run: from now on a drafter hears of it."""
        if request.drafts is not None and request not in self._open:
            self._open.add(request)
            self._hub.open(request.drafts)

    def sits_out(self, request: Request) -> bool:
        """The request waits for its drafts while others step."""
        return request in self._sitting_out

    def drafts_of(self, request: Request) -> list[int]:
        """The drafts that the request's next round should verify."""
        if request.drafts is None:
            return []
        wish = self._wishes.get(request, NO_DRAFTS)
        return request.drafts.tail.tokens[: min(wish.k, request.room_for_drafts)]

    def advance(self, request: Request, drafted: int, accepted: int, num_new: int) -> None:
        """A round is over and its tokens are confirmed: align the tail, tell the drafter."""
        drafts = request.drafts
        if drafts is None:
            return
        now = time.monotonic()
        drafts.tail.advance(drafted, num_new)
        answered = drafts.tail.take_empty()
        self._since[request] = now
        wish = self._wishes.get(request, NO_DRAFTS)
        if wish.k and request.room_for_drafts:
            request.window.observe(Round(drafted, accepted, answered), now)
        self._tell_drafter(request, request.window.wish(now, drafts.tail.lag).window)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if request in self._open:
            assert request.drafts is not None
            self._open.remove(request)
            self._hub.close(request.drafts)
        self._since.pop(request, None)
        self._wishes.pop(request, None)
        self._deadlines.pop(request, None)
        self._sitting_out.discard(request)
        self._arrived.set()

    def _wish(self, ready: Iterable[Request], now_s: float) -> None:
        self._wishes = {
            request: request.window.wish(now_s, request.drafts.tail.lag)
            for request in ready
            if request.drafts is not None
            and request in self._open
            and request.sequence.num_pending == 1
            # The last chunk of a prompt may be one token too; the first token waits for nothing.
            and request.num_generated > 0
        }
        # Whoever was paused in between starts anew: its drafts had all the time of the world.
        self._since = {request: self._since.get(request, now_s) for request in self._wishes}
        for request, wish in self._wishes.items():
            self._tell_drafter(request, wish.window)

    def _still_lacking(self, lacking: set[Request]) -> set[Request]:
        """Those of them that go on waiting; what the others waited is noted."""
        now = time.monotonic()
        lacking = {request for request in lacking if not request.ended}
        expired = {request for request in lacking if now >= self._deadlines[request]}
        for request in expired:
            waited = self._deadlines[request] - self._since[request]
            if waited > 0 and request.drafts is not None:
                # They take longer than that, and nobody knows how much.
                request.window.observe_latency(2 * waited)
                self._hub.note_vain_wait(request.drafts)
        served = {request for request in lacking - expired if not self._lacks(request)}
        for request in served:
            request.window.observe_latency(now - self._since[request])
        return lacking - expired - served

    def _lacks(self, request: Request) -> bool:
        """Whether more drafts may still come for the next round."""
        drafts = request.drafts
        if drafts is None or request.ended or request not in self._wishes:
            return False
        wish = self._wishes[request]
        wanted = min(wish.k, request.room_for_drafts, self._hub.granted(drafts))
        return len(drafts.tail.tokens) < wanted and not drafts.tail.settled

    def _tell_drafter(self, request: Request, window: int) -> None:
        if request.drafts is not None and not request.ended:
            self._hub.update(request.drafts, min(window, request.room_for_drafts))


def _is_fixed(request: Request) -> bool:
    return request.params.speculation.mode is SpeculationMode.FIXED

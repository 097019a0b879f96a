"""Which target gets a request, and what happens when that one refuses or is lost.

The least loaded ready target is first. A request that is refused before anything was delivered is
tried once at another one. A target that is lost later is replaced by one with the same weights and
numerics, which goes on behind the delivered tokens, so that the text is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

import structlog

from gateway.progress import Progress
from gateway.target_client import Metadata, TargetCall, TargetInfo, TargetLink
from outrider.serving.channel import MAX_MESSAGE_BYTES
from outrider.serving.discovery import Names, Resolve, resolve
from outrider.serving.errors import OutriderError, Overloaded, Unavailable
from outrider.serving.tls import ClientTls
from protos.outrider.v1 import target_pb2 as pb

log = structlog.get_logger(__name__)

LOAD_S = 1.0
"""Between two looks at how busy the targets are."""
MAX_MOVES = 8
"""Most times that one request goes on at another target."""


class TargetPool:
    """All targets; names are looked up again and again, each of their addresses is a target."""

    def __init__(
        self,
        addresses: Sequence[str],
        token_table_hash: bytes,
        on_change: Callable[[bool], None],
        resolve: Resolve = resolve,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: ClientTls | None = None,
    ) -> None:
        """`on_change(any target is ready)` is called when that may have changed.

        tls: None for plain text to the targets.
        """
        self._token_table_hash = token_table_hash
        self._on_change = on_change
        self._names = Names(addresses, resolve)
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._links: list[TargetLink] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_routed = 0
        self._last_routed: dict[TargetLink, int] = {}
        if not self._names.may_change:
            self._set_addresses(addresses)

    @property
    def ready(self) -> bool:
        """At least one target can be asked."""
        return any(link.info is not None for link in self._links)

    @property
    def states(self) -> dict[str, int]:
        """How many targets can be asked, and how many cannot."""
        num_ready = sum(link.info is not None for link in self._links)
        return {"ready": num_ready, "unready": len(self._links) - num_ready}

    @property
    def max_model_len(self) -> int | None:
        """What every ready target takes; None while there is none."""
        return min((link.info.max_model_len for link in self._links if link.info), default=None)

    @property
    def longest_model_len(self) -> int | None:
        """What some ready target takes; None while there is none."""
        return max((link.info.max_model_len for link in self._links if link.info), default=None)

    def start(self) -> None:
        """Begin to look for the targets."""
        for link in self._links:
            link.start()
        self._tasks.append(asyncio.create_task(self._watch_load(), name="load of targets"))
        if self._names.may_change:
            discovery = self._names.follow(self._discovered)
            self._tasks.append(asyncio.create_task(discovery, name="target discovery"))

    async def close(self) -> None:
        """Cut all connections."""
        tasks = [*self._tasks, *self._leaving]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(link.close() for link in self._links))

    def route(self, num_choices: int = 1) -> Route:
        """A place at the least loaded ready target. Raises Unavailable, saying why each is not."""
        for link in self.ranked():
            assert link.info is not None
            return Route(self, link, link.info, num_choices)
        reasons = "; ".join(f"{link.address}: {link.reason}" for link in self._links)
        raise Unavailable(f"no target is ready ({reasons or 'none is known'})")

    def ranked(self, without: Collection[TargetLink] = ()) -> list[TargetLink]:
        """Ready targets, the best first: those that answer, then the least loaded, then in turn."""
        ready = [link for link in self._links if link.info is not None and link not in without]
        return sorted(
            ready,
            key=lambda link: (not link.answers, link.load, self._last_routed.get(link, 0)),
        )

    def note_routed(self, link: TargetLink) -> None:
        """A request goes there."""
        self._num_routed += 1
        self._last_routed[link] = self._num_routed

    async def _watch_load(self) -> None:
        while True:
            await asyncio.sleep(LOAD_S)
            ready = [link for link in self._links if link.info is not None]
            if len(ready) > 1:
                await asyncio.gather(*(link.refresh_load() for link in ready))

    async def _discovered(self, addresses: set[str]) -> None:
        self._set_addresses(addresses)

    def _set_addresses(self, wanted: Collection[str]) -> None:
        for link in [link for link in self._links if link.address not in wanted]:
            log.info("target has left", address=link.address)
            self._links.remove(link)
            self._last_routed.pop(link, None)
            leaving = asyncio.create_task(link.close_when_idle())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            self._on_change(self.ready)
        known = {link.address for link in self._links}
        for address in dict.fromkeys(wanted):
            if address in known:
                continue
            link = TargetLink(
                address,
                self._token_table_hash,
                lambda: self._on_change(self.ready),
                max_message_bytes=self._max_message_bytes,
                tls=self._tls,
                server_name=self._names.host_of(address),
            )
            self._links.append(link)
            if self._tasks:  # started already
                link.start()


class Route:
    """One request's way through the targets. It holds its place from the start, so that requests
    that come together do not all see the same target idle."""

    def __init__(
        self, pool: TargetPool, link: TargetLink, info: TargetInfo, num_choices: int
    ) -> None:
        self.info = info
        """Of the first target; every other one that is used fits it."""
        self._pool = pool
        self._num_choices = num_choices
        self._link: TargetLink | None = None
        self._call: TargetCall | None = None
        self._closed = False
        self._avoid: set[TargetLink] = set()
        self._num_moves = 0
        self._progress = Progress(num_choices)
        self._hold(link)

    def close(self) -> None:
        """Give the place back and end the call if it runs still. More than once does no harm."""
        self._closed = True
        self._release()
        if self._call is not None:
            self._call.cancel()

    async def settle(self) -> None:
        """Behind the finish: let the call end by itself, so that it counts as finished there."""
        if self._call is not None:
            await self._call.settle()

    async def chunks(
        self,
        request: pb.TokenRequest,
        time_remaining: Callable[[], float | None],
        on_routed: Callable[[str], None],
        metadata: Metadata = (),
    ) -> AsyncGenerator[pb.TokenChunk, None]:
        """The answer as if from one target, read only as fast as it is asked for.

        Raises OutriderError. `on_routed(address)` is called for each target that is asked, and each
        gets the `metadata`.
        """
        progress = self._progress
        loss: OutriderError | None = None
        while True:
            link = self._link
            assert link is not None
            on_routed(link.address)
            self._call = call = link.generate(progress.rest_of(request), time_remaining(), metadata)
            if self._closed:
                call.cancel()
            fresh = True
            try:
                async with contextlib.aclosing(call.chunks()) as chunks:
                    async for chunk in chunks:
                        if fresh:
                            fresh = False
                            self._avoid.clear()
                        yield progress.take(chunk)
                if progress.finished:
                    return
                raise Unavailable("the target ended the stream without a finish")
            except (Unavailable, Overloaded) as error:
                # A loss in the middle says more than the refusals that may follow it.
                loss = error if loss is None or not progress.started else loss
                refused = fresh or isinstance(error, Unavailable)
                if self._closed or not refused or not self._move(link, request):
                    if loss is error:
                        raise
                    raise loss from error
                log.warning(
                    "request moves to another target",
                    request_id=request.request_id,
                    tokens=progress.num_tokens,
                    reason=str(error),
                )

    def _move(self, lost: TargetLink, request: pb.TokenRequest) -> bool:
        """Hold a place at another target that may go on; whether there is one."""
        progress = self._progress
        self._avoid.add(lost)
        most = MAX_MOVES if progress.started else 1
        if self._num_moves >= most or not progress.can_resume(request):
            return False
        for link in self._pool.ranked(without=self._avoid):
            assert link.info is not None
            if not _fits(link.info, self.info, request):
                continue
            if progress.started and not _same_text(link.info, self.info):
                continue
            self._num_moves += 1
            self._release()
            self._hold(link)
            return True
        return False

    def _hold(self, link: TargetLink) -> None:
        self._link = link
        link.hold(self._num_choices)
        self._pool.note_routed(link)

    def _release(self) -> None:
        if self._link is not None:
            self._link.release(self._num_choices)
            self._link = None


def _fits(other: TargetInfo, first: TargetInfo, request: pb.TokenRequest) -> bool:
    """The request was checked for the first target; the other one takes it as well."""
    longest = len(request.token_ids) + request.stopping.max_tokens
    return (
        other.eos_token_ids == first.eos_token_ids
        and longest <= other.max_model_len
        and request.speculation.max_draft_tokens <= other.max_draft_tokens
    )


def _same_text(other: TargetInfo, first: TargetInfo) -> bool:
    """The two give the same tokens, bit for bit, and say so."""
    ours = (first.weights_fingerprint, first.numerics_id)
    return all(ours) and ours == (other.weights_fingerprint, other.numerics_id)

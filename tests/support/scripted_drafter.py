"""A drafter that says what a test tells it to: in this event loop, or as a process to be killed.

    async with ScriptedDrafter(Drafting(Perfect(known))) as drafter:
        ...                                   # point a target at drafter.address
    assert drafter.record.windows(1) == [...]

As a process, for tests that kill: `spawn_scripted_drafter(spec)`, where the spec is a JSON object
{"script": "perfect" | "wrong" | "partial" | "empty" | "mute" | "junk", "known": [[prompt, output]],
"vocab_size", "right", "late_s", "port"}. The behaviours themselves are in `draft_scripts`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from outrider.serving.channel import server_options
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc
from tests.support.draft_scripts import (
    Behaviour,
    Drafting,
    Empty,
    Junk,
    Late,
    Mute,
    Partial,
    Perfect,
    Reply,
    ScriptedSequence,
    Wrong,
)

START_S = 20.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Received:
    """One update, on which stream it came."""

    stream: int
    update: draft_pb2.SequenceUpdate


@dataclass
class Record:
    """What a scripted drafter was told and what it said. Streams count from 0, ids are theirs."""

    hellos: list[draft_pb2.Hello] = field(default_factory=list)
    updates: list[Received] = field(default_factory=list)
    frames_sent: list[draft_pb2.SpeculateResponse] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Where the target broke the protocol."""
    streams_opened: int = 0
    streams_open: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def of(self, sequence_id: int, stream: int = 0) -> list[draft_pb2.SequenceUpdate]:
        """All updates of one sequence."""
        return [
            each.update
            for each in self.updates
            if each.stream == stream and each.update.sequence_id == sequence_id
        ]

    def windows(self, sequence_id: int, stream: int = 0) -> list[int]:
        """The windows that were granted, in order."""
        return [update.window for update in self.of(sequence_id, stream)]

    def sequence_ids(self, stream: int = 0) -> list[int]:
        """Every sequence, in the order in which they came."""
        return list(dict.fromkeys(e.update.sequence_id for e in self.updates if e.stream == stream))

    @property
    def finished(self) -> set[tuple[int, int]]:
        """(stream, sequence id) of everything that the target has said is over."""
        return {(e.stream, e.update.sequence_id) for e in self.updates if e.update.finished}

    @property
    def tokens_sent(self) -> int:
        """Proposed tokens, junk included."""
        return sum(len(p.tokens) for frame in self.frames_sent for p in frame.proposals)

    def note(self) -> None:
        """Wake those who wait."""
        self._changed.set()

    async def wait_for(self, enough: Callable[[Record], bool], timeout_s: float = 10.0) -> None:
        """Return once `enough(record)`; TimeoutError after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while not enough(self):
                self._changed.clear()
                await self._changed.wait()


class ScriptedDrafter(draft_pb2_grpc.DraftServicer):
    """A Draft server on a free port. `behaviour` may be exchanged at any time."""

    def __init__(
        self,
        behaviour: Behaviour,
        *,
        hello: draft_pb2.Hello | None = None,
        refuse: tuple[grpc.StatusCode, str] | None = None,
        silent: bool = False,
        port: int = 0,
    ) -> None:
        """`hello` is merged over one that every target accepts; `refuse` ends each stream at once;
        `silent` never answers the Hello."""
        self.behaviour = behaviour
        self.refuse = refuse
        self.silent = silent
        self.record = Record()
        self.hello = draft_pb2.Hello(
            protocol_version=draft_pb2.ProtocolVersion(major=1, minor=0),
            noise_version=1,
            instance_id=f"scripted-{id(self):x}",
            limits=draft_pb2.Limits(max_sequences=1024, max_len=2**20, max_window=256),
        )
        if hello is not None:
            self.hello.MergeFrom(hello)
        self._port = port
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        """Where it listens; stays the same after `stop` and `start`."""
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen."""
        self._server = grpc.aio.server(options=server_options())
        draft_pb2_grpc.add_DraftServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """End every stream and stop listening."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def Speculate(
        self, request_iterator: AsyncIterator[draft_pb2.SpeculateRequest], context: Any
    ) -> AsyncIterator[draft_pb2.SpeculateResponse]:
        """One stream."""
        stream = _ScriptedStream(self, self.record.streams_opened)
        self.record.streams_opened += 1
        self.record.streams_open += 1
        self.record.note()
        reader = None
        try:
            if self.refuse is not None:
                await context.abort(*self.refuse)
            first = await anext(request_iterator)
            self.record.hellos.append(first.hello)
            self.record.note()
            if self.silent:
                await asyncio.Event().wait()
            yield draft_pb2.SpeculateResponse(hello=self.hello)
            reader = asyncio.create_task(stream.read(request_iterator))
            while (reply := await stream.outgoing.get()) is not None:
                if reply.close is not None:
                    if reply.close[0] is grpc.StatusCode.OK:
                        return  # gRPC aborts with errors only
                    await context.abort(*reply.close)
                self.record.frames_sent.append(reply.frame)
                self.record.note()
                yield reply.frame
        finally:
            if reader is not None:
                reader.cancel()
            self.record.streams_open -= 1
            self.record.note()

    async def GetStatus(
        self, request: draft_pb2.DraftGetStatusRequest, context: Any
    ) -> draft_pb2.DraftGetStatusResponse:
        """Enough for a target that asks."""
        return draft_pb2.DraftGetStatusResponse(
            proposer="scripted",
            instance_id=self.hello.instance_id,
            streams=self.record.streams_open,
            proposed_tokens=self.record.tokens_sent,
            state="serving",
        )


class _ScriptedStream:
    """Sequences of one stream, and replies that wait for their time or for further updates."""

    def __init__(self, drafter: ScriptedDrafter, number: int) -> None:
        self.outgoing: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._drafter = drafter
        self._number = number
        self._sequences: dict[int, ScriptedSequence] = {}
        self._finished: set[int] = set()
        self._held: dict[int, list[list[Any]]] = defaultdict(list)  # [updates to come, reply]
        self._due_s: dict[int, float] = defaultdict(float)
        self._late: dict[int, deque[Reply]] = defaultdict(deque)

    async def read(self, requests: AsyncIterator[draft_pb2.SpeculateRequest]) -> None:
        """Take updates in until the target hangs up."""
        record = self._drafter.record
        async for frame in requests:
            if frame.HasField("hello"):
                record.problems.append("a second Hello")
            for update in frame.updates:
                record.updates.append(Received(self._number, update))
                self._release(update.sequence_id, everything=update.finished)
                sequence = self._apply(update)
                if sequence is not None:
                    for reply in self._drafter.behaviour.answer(sequence):
                        self._deliver(update.sequence_id, reply)
            record.note()
        self.outgoing.put_nowait(None)

    def _apply(self, update: draft_pb2.SequenceUpdate) -> ScriptedSequence | None:
        problems = self._drafter.record.problems
        sequence_id = update.sequence_id
        if sequence_id in self._finished:
            problems.append(f"sequence {sequence_id}: an update after it had finished")
        if update.finished:
            self._sequences.pop(sequence_id, None)
            self._finished.add(sequence_id)
            return None
        sequence = self._sequences.get(sequence_id)
        if sequence is None or update.epoch > sequence.epoch:
            if not update.HasField("open") or update.base_len:
                problems.append(f"sequence {sequence_id}: epoch {update.epoch} without an open")
            sequence = ScriptedSequence(sequence_id, update.epoch, update.open)
            self._sequences[sequence_id] = sequence
        elif update.epoch < sequence.epoch:
            problems.append(f"sequence {sequence_id}: epoch {update.epoch} came back")
            return None
        elif update.base_len != len(sequence.confirmed):
            problems.append(
                f"sequence {sequence_id}: base_len {update.base_len}, "
                f"confirmed are {len(sequence.confirmed)}"
            )
            return None
        sequence.confirmed.extend(update.tokens)
        sequence.window = update.window
        sequence.update_seq = update.update_seq
        sequence.updates += 1
        return sequence

    def _deliver(self, sequence_id: int, reply: Reply) -> None:
        if reply.hold_updates:
            self._held[sequence_id].append([reply.hold_updates, reply])
            return
        loop = asyncio.get_running_loop()
        late = self._late[sequence_id]
        due_s = max(self._due_s[sequence_id], loop.time() + reply.delay_s)
        self._due_s[sequence_id] = due_s
        if not late and due_s <= loop.time():
            self.outgoing.put_nowait(reply)
            return
        # Timers of one moment fire in any order, so each one sends whatever is the oldest.
        late.append(reply)
        loop.call_at(due_s, lambda: self.outgoing.put_nowait(late.popleft()))

    def _release(self, sequence_id: int, *, everything: bool) -> None:
        held = self._held[sequence_id]
        for entry in held:
            entry[0] -= 1
        while held and (everything or held[0][0] <= 0):
            self.outgoing.put_nowait(held.pop(0)[1])


class SpawnedDrafter:
    """A drafter in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    async def kill(self) -> None:
        """SIGKILL: no goodbye on the wire."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(self.process.wait(), START_S)

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)


async def spawn_scripted_drafter(spec: dict[str, Any]) -> SpawnedDrafter:
    """Start the process and wait until it listens; call `kill` at the end."""
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.scripted_drafter",
        cwd=_ROOT, env=os.environ | {"PYTHONPATH": path},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    process.stdin.write(json.dumps(spec).encode())
    process.stdin.close()
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        return SpawnedDrafter(process, line.decode().strip())
    except BaseException:
        process.kill()
        raise


def behaviour_from_spec(spec: dict[str, Any]) -> Behaviour:
    """The behaviour that a JSON spec names."""
    known = {tuple(prompt): output for prompt, output in spec.get("known", [])}
    vocab_size = spec.get("vocab_size", 2**31)
    made: dict[str, Callable[[], Behaviour]] = {
        "perfect": lambda: Drafting(Perfect(known)),
        "wrong": lambda: Drafting(Wrong(known, vocab_size)),
        "partial": lambda: Drafting(Partial(known, spec["right"], vocab_size)),
        "empty": Empty,
        "mute": Mute,
        "junk": Junk,
    }
    behaviour = made[spec["script"]]()
    return Late(behaviour, spec["late_s"]) if spec.get("late_s") else behaviour


async def _main() -> None:
    spec = json.load(sys.stdin)
    drafter = ScriptedDrafter(behaviour_from_spec(spec), port=spec.get("port", 0))
    await drafter.start()
    print(drafter.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())

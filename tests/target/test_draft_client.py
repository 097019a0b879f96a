"""One drafter over a real connection: what it may do to us, and what we tell it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from outrider.serving.channel import server_options
from protos.outrider.v1 import draft_pb2
from target_service import draft_silence
from target_service.draft_client import DraftClient
from target_service.draft_tail import DraftTotals, Unused
from tests.support.draft_scripts import JUNK, Empty, Going, Junk, Late, Mute
from tests.support.draft_stream import make_hello
from tests.support.hub_world import HASH, OUTPUT, PROMPT, WAIT_S, Watched, honest, hub_to
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.target_parts import MAX_WINDOW, VOCAB_SIZE


@contextlib.asynccontextmanager
async def connect(address: str, **hello: Any) -> AsyncIterator[tuple[DraftClient, Watched]]:
    """A client that tries to connect."""
    watched = Watched()
    client = DraftClient(
        address,
        make_hello(**({"token_table_hash": HASH} | hello)),
        on_arrival=watched.changed.set,
        on_ready=lambda: None,
        on_lost=watched.lost.append,
        on_refused=lambda sequence_id: None,
        totals=DraftTotals(),
    )
    client.start()
    try:
        yield client, watched
    finally:
        await client.stop()


@pytest.mark.parametrize("noise_version", [1, 2])
async def test_what_an_operator_should_know_is_in_the_log(noise_version: int) -> None:
    """Noise of another version is, and where nothing is wrong there is no word of it."""
    hello = draft_pb2.Hello(weights_fingerprint="w", noise_version=noise_version)
    with capture_logs() as lines:
        async with (
            ScriptedDrafter(honest(), hello=hello) as drafter,
            connect(drafter.address) as (client, watched),
        ):
            await watched.until(lambda: client.ready)
    (line,) = [line for line in lines if line["event"] == "drafter ready"]
    assert ("its noise has version 2" in line.get("warning", "")) is (noise_version == 2)
    assert ("warning" in line) is (noise_version == 2)


async def test_another_token_table_is_refused_with_both_named():
    """Such a drafter is not used, and its state says which two tables do not match."""
    other = bytes(32)
    async with (
        ScriptedDrafter(honest(), hello=draft_pb2.Hello(token_table_hash=other)) as drafter,
        connect(drafter.address) as (client, watched),
    ):
        await watched.until(lambda: client.state == "refused")
        assert HASH.hex() in client.reason
        assert other.hex() in client.reason
        assert not client.ready


@pytest.mark.parametrize(
    ("version", "good"),
    [((1, 0), True), ((1, 1), True), ((1, 2), False), ((2, 0), False), ((0, 9), False)],
)
async def test_one_minor_version_of_skew_works(version, good):
    """Nearer versions talk, others are refused by name."""
    major, minor = version
    hello = draft_pb2.Hello(protocol_version={"major": major, "minor": minor})
    async with (
        ScriptedDrafter(honest(), hello=hello) as drafter,
        connect(drafter.address) as (client, watched),
    ):
        drafter.hello.protocol_version.major, drafter.hello.protocol_version.minor = version
        await watched.until(lambda: client.state in ("ready", "refused"))
        assert client.ready == good
        assert good or f"{major}.{minor}" in client.reason


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
    ],
)
async def test_the_status_of_a_stream_refused_at_open_is_recorded(code):
    """Although we write at once: the true code is known, and we do not try again at once."""
    reasons: Counter[tuple[str, str]] = Counter()
    async with ScriptedDrafter(honest(), refuse=(code, "go away")) as drafter:
        for _ in range(30):
            async with connect(drafter.address) as (client, watched):
                await watched.until(lambda client=client: client.state in ("refused", "backoff"))
                reasons[client.state, client.reason] += 1
    assert reasons == {("refused", f"{code.name}: go away"): 30}


async def test_an_absent_drafter_is_tried_with_growing_pauses_and_found():
    """Few attempts while it is away; soon after it has come it is used."""
    async with ScriptedDrafter(honest()) as drafter, connect(drafter.address) as (client, watched):
        await drafter.stop()
        await watched.until(lambda: client.state == "backoff")
        assert "UNAVAILABLE" in client.reason
        await asyncio.sleep(1.0)
        assert client.connect_attempts <= 5
        await drafter.start()
        await watched.until(lambda: client.ready)


async def test_a_drafter_that_never_says_hello_is_not_waited_for_for_ever():
    """The handshake has a deadline, after which the next attempt comes."""
    async with (
        ScriptedDrafter(honest(), silent=True) as drafter,
        connect(drafter.address) as (client, watched),
    ):
        await watched.until(lambda: client.state == "backoff")
        assert client.reason


async def test_a_restarted_drafter_gets_the_whole_prefix_again():
    """A lost stream costs drafts and nothing else; what was in the tail counts as lost."""
    async with ScriptedDrafter(honest()) as drafter, hub_to(drafter.address) as world:
        await world.ready()
        world.open()
        assert await world.drafts() == OUTPUT[:4]
        world.confirm(4)
        assert await world.drafts() == OUTPUT[4:8]
        await drafter.stop()
        await world.until(lambda: world.hub.granted(world.sequence) == 0)
        assert world.sequence.tail.tokens == []
        assert world.totals.unused[Unused.LOST] == 4
        world.confirm(2)
        await drafter.start()
        await world.ready()
        assert await world.drafts() == OUTPUT[6:10]
    (update, *_) = drafter.record.of(drafter.record.sequence_ids(stream=1)[0], stream=1)
    assert list(update.tokens) == PROMPT + OUTPUT[:6]
    assert drafter.record.problems == []


async def test_sequences_move_to_another_drafter():
    """When one dies the other takes over, with the prefix so far and a new epoch."""
    async with ScriptedDrafter(honest()) as first, ScriptedDrafter(honest()) as second:
        async with hub_to(first.address, second.address) as world:
            await world.until(lambda: all(client.ready for client in world.hub.clients))
            world.open()
            await world.drafts()
            assert [c.num_sequences for c in world.hub.clients] == [1, 0]
            world.confirm(2)
            await first.stop()
            await world.until(lambda: world.hub.clients[1].num_sequences == 1)
            assert await world.drafts() == OUTPUT[2:6]
            (update, *_) = second.record.of(1)
            assert (update.epoch, update.base_len) == (2, 0)
            assert list(update.tokens) == PROMPT + OUTPUT[:2]
            world.hub.close(world.sequence)
            await second.record.wait_for(lambda record: record.finished == {(0, 1)})
        assert second.record.problems == []


@pytest.mark.parametrize("reason", ["REASON_EVICTED", "REASON_UNKNOWN"])
async def test_a_forgotten_sequence_is_sent_again(reason):
    """One resync: a new epoch with everything, and drafts go on."""
    value = draft_pb2.SequenceGone.Reason.Value(reason)
    async with ScriptedDrafter(Going(honest(), 2, value)) as drafter:
        async with hub_to(drafter.address) as world:
            await world.ready()
            world.open()
            await world.drafts()
            world.confirm(4)
            assert await world.drafts() == OUTPUT[4:8]
            assert world.hub.frames["resync"] == 1
        assert [update.epoch for update in drafter.record.of(1)] == [1, 1, 2]
        assert drafter.record.problems == []


@pytest.mark.parametrize("reason", ["REASON_FULL", "REASON_TOO_LONG"])
async def test_a_refused_sequence_is_left_alone(reason):
    """No more drafts here for it, nothing more is sent for it, and nobody waits."""
    value = draft_pb2.SequenceGone.Reason.Value(reason)
    async with ScriptedDrafter(Going(honest(), 1, value)) as drafter:
        async with hub_to(drafter.address) as world:
            await world.ready()
            world.open()
            await drafter.record.wait_for(lambda record: bool(record.frames_sent))
            await world.until(lambda: world.hub.granted(world.sequence) == 0)
            world.confirm(2)
            world.confirm(2)
            world.hub.close(world.sequence)
            world.sequence = world.make_sequence()
            world.open()
            await drafter.record.wait_for(lambda record: bool(record.of(2)))
        assert len(drafter.record.of(1)) == 1


async def test_a_drafter_that_forgets_every_time_gets_fewer_and_fewer_prefixes():
    """Each costs something; when it drafts at last, the sequence is there."""
    gone = draft_pb2.SequenceGone.REASON_EVICTED
    drafter = ScriptedDrafter(Going(honest(), 1, gone, every_epoch=True))
    async with drafter, hub_to(drafter.address) as world:
        await world.ready()
        world.open()
        await world.until(lambda: world.hub.granted(world.sequence) == 0)
        await asyncio.sleep(0.4)
        assert 3 <= world.hub.frames["resync"] <= 7
        drafter.behaviour = honest()
        await world.drafts()


async def test_gone_of_another_epoch_changes_nothing():
    """It speaks of what is over already."""
    async with ScriptedDrafter(Junk(JUNK["gone_other_epoch"])) as drafter:
        async with hub_to(drafter.address) as world:
            await world.ready()
            world.open()
            await world.until(lambda: world.hub.frames["stale_gone"] == 1)
            drafter.behaviour = honest()
            world.confirm(1)
            assert await world.drafts() == OUTPUT[1:5]
        assert {update.epoch for update in drafter.record.of(1)} == {1}


@pytest.mark.parametrize("kind", JUNK)
async def test_junk_costs_nothing_but_its_own_drafts(kind):
    """Whatever a frame holds, the connection and the books survive, and good drafts work again."""
    async with ScriptedDrafter(Junk(JUNK[kind])) as drafter, hub_to(drafter.address) as world:
        client = await world.ready()
        world.open()
        await drafter.record.wait_for(lambda record: bool(record.frames_sent))
        await asyncio.sleep(0.02)
        tail = world.sequence.tail
        assert len(tail.tokens) <= MAX_WINDOW
        assert all(token < VOCAB_SIZE for token in tail.tokens)
        drafter.behaviour = honest()
        world.confirm(1)
        await world.until(lambda: tail.tokens == OUTPUT[1:5])
        assert client.ready
        unused = sum(world.totals.unused.values())
        assert world.totals.num_proposed == world.num_drafted + unused + tail.num_open


async def test_bytes_that_are_no_message_end_the_stream_and_nothing_else():
    """The client notes it and connects again."""

    async def speculate(requests, context):
        yield draft_pb2.SpeculateResponse(hello=make_hello()).SerializeToString()
        yield b"\xff\xff\xff\xff"
        await asyncio.sleep(WAIT_S)

    handler = grpc.stream_stream_rpc_method_handler(speculate)
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("outrider.v1.Draft", {"Speculate": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as (client, watched):
            await watched.until(lambda: client.connect_attempts >= 2)
            assert not client._task.done()
    finally:
        await server.stop(0)


async def test_a_silent_drafter_is_not_waited_for_until_it_speaks_again():
    """Asked and silent for about a second: not responsive; one answer makes it so again."""
    async with ScriptedDrafter(Mute()) as drafter, hub_to(drafter.address) as world:
        client = await world.ready()
        world.open()
        asked_at = time.monotonic()
        await drafter.record.wait_for(lambda record: bool(record.updates))
        assert client.responsive
        await world.until(lambda: not client.responsive)
        assert 0.5 < time.monotonic() - asked_at < 2.0
        assert world.hub.granted(world.sequence) == 0
        drafter.behaviour = honest()
        world.confirm(1)
        await world.until(lambda: client.responsive)
        assert world.hub.granted(world.sequence) == 4


async def test_a_drafter_without_ideas_is_not_silent():
    """It has answered, so it stays responsive however long nothing else is asked."""
    async with ScriptedDrafter(Empty()) as drafter, hub_to(drafter.address) as world:
        client = await world.ready()
        world.open()
        await world.until(lambda: world.sequence.tail.exhausted)
        await asyncio.sleep(1.2)
        assert client.responsive


async def test_a_sequence_that_ends_unanswered_does_not_make_its_drafter_silent():
    """Nobody owes an answer for a sequence that is over."""
    async with ScriptedDrafter(Mute()) as drafter, hub_to(drafter.address) as world:
        client = await world.ready()
        world.open()
        await drafter.record.wait_for(lambda record: bool(record.updates))
        world.hub.close(world.sequence)
        await drafter.record.wait_for(lambda record: bool(record.finished))
        await asyncio.sleep(1.2)
        assert client.responsive


async def test_what_comes_for_a_finished_sequence_is_counted_and_ignored():
    """Its last proposal may cross its end on the wire; that is nobody's fault."""
    async with ScriptedDrafter(Mute()) as drafter, hub_to(drafter.address) as world:
        await world.ready()
        world.open()
        await drafter.record.wait_for(lambda record: bool(record.updates))
        world.hub.close(world.sequence)
        drafter.behaviour = Junk(
            lambda s: draft_pb2.SpeculateResponse(
                proposals=[draft_pb2.Proposal(sequence_id=1, epoch=1, tokens=[1])]
            )
        )
        world.sequence = world.make_sequence()
        world.open()
        await world.until(lambda: world.hub.frames["finished"] == 1)


async def test_a_drafter_with_a_small_window_is_asked_for_no_more():
    """Its own limit counts, both for what we ask and for what a step waits for."""
    hello = draft_pb2.Hello(limits=draft_pb2.Limits(max_window=2))
    async with ScriptedDrafter(honest(), hello=hello) as drafter:
        async with hub_to(drafter.address) as world:
            await world.ready()
            world.open(window=8)
            assert await world.drafts(2) == OUTPUT[:2]
            assert world.hub.granted(world.sequence) == 2
        assert max(drafter.record.windows(1)) == 2


async def test_a_sequence_that_no_longer_asks_is_owed_nothing():
    """A window of 0 takes the question back: the drafter is not silent for keeping quiet."""
    async with ScriptedDrafter(Mute()) as drafter, hub_to(drafter.address) as world:
        client = await world.ready()
        world.open()
        await drafter.record.wait_for(lambda record: any(u.window for u in record.of(1)))
        world.confirm(1, window=0)
        await asyncio.sleep(1.2)
        assert client.responsive


async def test_tokens_for_an_ended_sequence_are_in_the_books():
    """Proposals that cross the end on the wire are proposed and unused like any others."""
    async with ScriptedDrafter(Late(honest(), 0.1)) as drafter, hub_to(drafter.address) as world:
        await world.ready()
        world.open()
        await drafter.record.wait_for(lambda record: any(u.window for u in record.of(1)))
        world.sequence.tail.finish()
        world.hub.close(world.sequence)
        await world.until(lambda: world.hub.frames["finished"] == 1)
        assert world.totals.num_proposed == sum(world.totals.unused.values()) == 4


async def test_a_drafter_that_stalled_gets_another_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequences are gone and nobody asks it any more, so it could not show that it is back."""
    monkeypatch.setattr(draft_silence, "_FORGIVEN_AFTER_S", 1.5)
    async with ScriptedDrafter(Mute()) as drafter, hub_to(drafter.address) as world:
        client = await world.ready()
        world.open()
        await drafter.record.wait_for(lambda record: any(u.window for u in record.of(1)))
        client.note_vain_wait()
        world.hub.close(world.sequence)
        await world.until(lambda: not client.may_be_asked)
        await world.until(lambda: client.may_be_asked)
        assert not client.responsive  # it has not said a word yet
        drafter.behaviour = honest()
        world.sequence = world.make_sequence()
        world.open()
        await world.until(lambda: client.responsive)


async def test_one_wait_in_vain_is_over_with_the_next_answer():
    """Late answers count as answers, be they of no use: whoever waits for drafts may wait again."""
    async with ScriptedDrafter(Late(honest(), 0.1)) as drafter, hub_to(drafter.address) as world:
        client = await world.ready()
        world.open()
        await drafter.record.wait_for(lambda record: any(u.window for u in record.of(1)))
        client.note_vain_wait()
        assert world.hub.granted(world.sequence) == 0
        world.sequence.confirmed.append(99)  # not what it drafts: its answer will be of no use
        world.sequence.tail.advance(0, 1)
        await world.until(lambda: bool(world.totals.unused))
        assert world.hub.granted(world.sequence) == 4

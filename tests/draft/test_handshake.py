"""How a `Speculate` stream begins: what both sides say, and what is refused."""

from __future__ import annotations

import grpc

from draft_service.batch import DraftLoop
from draft_service.book import Capacity
from draft_service.proposers.ngram import NgramProposer
from draft_service.record import SequenceRecords
from draft_service.servicer import DraftServicer
from outrider.serving.interceptors import ErrorInterceptor
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc
from tests.support.draft_stream import (
    DraftStream,
    RunningDraft,
    dial,
    make_hello,
    open_stream,
)
from tests.support.draft_updates import make_update


async def status_of_hello(address: str, frame: draft_pb2.SpeculateRequest) -> tuple:
    """How a stream ends that begins with `frame`."""
    async with dial(address) as call:
        await call.write(frame)
        return await DraftStream(call).status()


async def test_the_hello_says_what_it_is_and_accepts(draft: RunningDraft) -> None:
    """Limits are the settings', the hash is empty, the name is that of GetStatus."""
    async with open_stream(draft.address) as stream:
        hello = stream.hello
    assert (hello.protocol_version.major, hello.protocol_version.minor) == (1, 0)
    assert hello.token_table_hash == b""
    assert (hello.limits.max_sequences, hello.limits.max_window) == (4, 16)
    assert hello.limits.max_frame_bytes == 64 * 1024
    assert hello.instance_id == (await draft.status()).instance_id


async def test_a_hello_holds_no_more_than_names(draft: RunningDraft) -> None:
    """They are kept and logged, whatever a target calls itself."""
    async with open_stream(draft.address, make_hello(instance_id="x" * 1000)) as stream:
        assert stream.hello.instance_id
    hello = make_hello(instance_id="x" * 5000)
    code, message = await status_of_hello(draft.address, draft_pb2.SpeculateRequest(hello=hello))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "the target's Hello may have 4096 bytes" in message


async def test_one_minor_version_of_skew_works(draft: RunningDraft) -> None:
    """Two do not, nor does another major version; the message names both."""
    ok = draft_pb2.ProtocolVersion(major=1, minor=1)
    async with open_stream(draft.address, make_hello(protocol_version=ok)) as stream:
        assert stream.hello.instance_id
    for major, minor in ((1, 2), (2, 0)):
        hello = make_hello(protocol_version=draft_pb2.ProtocolVersion(major=major, minor=minor))
        code, message = await status_of_hello(
            draft.address, draft_pb2.SpeculateRequest(hello=hello)
        )
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"{major}.{minor}" in message and "1.0" in message


async def test_the_first_frame_must_be_a_hello_alone(draft: RunningDraft) -> None:
    """Updates before or beside it are refused with the field's name."""
    frames = {
        "hello": draft_pb2.SpeculateRequest(updates=[make_update()]),
        "updates": draft_pb2.SpeculateRequest(hello=make_hello(), updates=[make_update()]),
    }
    for field, frame in frames.items():
        code, message = await status_of_hello(draft.address, frame)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith(f"{field}:")


async def test_a_stream_without_a_hello_is_ended() -> None:
    """Silent connections do not use up the streams of a drafter."""
    proposer = NgramProposer(1, 4)
    servicer = DraftServicer(
        proposer, DraftLoop(proposer), Capacity(4, 100, 1000), SequenceRecords(),
        max_window=4, instance_id="x", hello_timeout_s=0.05,
    )  # fmt: skip
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with dial(f"127.0.0.1:{port}") as call:
            code, message = await DraftStream(call).status()
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert message.startswith("hello:")
    finally:
        await server.stop(0)

"""What the operator and a key say of a request, against what it asks for."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from gateway.requests import TokenCaps, place_priority
from outrider.params import StoppingParams
from outrider.serving.errors import InvalidRequest
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import gateway_with
from tests.support.scripted_target import Script


@pytest.mark.parametrize(
    ("default", "most", "asked", "given"),
    [
        (0, 0, None, None),
        (0, 0, 7, 7),
        (5, 0, None, 5),
        (5, 0, 7, 7),
        (0, 9, None, 9),
        (5, 9, None, 5),
        (20, 9, None, 9),
        (5, 9, 9, 9),
    ],
)
def test_max_tokens_inside_the_cap(
    default: int, most: int, asked: int | None, given: int | None
) -> None:
    """Who says nothing gets the default, or the cap where that is less."""
    caps = TokenCaps(default, most)
    assert caps.apply(StoppingParams(max_tokens=asked)).max_tokens == given


def test_a_default_makes_room_for_min_tokens() -> None:
    """Who asks for at least ten tokens is not given a default of five."""
    assert TokenCaps(default=5).apply(StoppingParams(min_tokens=10)).max_tokens == 10


@pytest.mark.parametrize(("of_operator", "default"), [(0, 16), (5, 5), (40, 40)])
def test_the_operators_default_counts_before_the_doors(of_operator: int, default: int) -> None:
    """A door's own is for where nobody has set one."""
    assert TokenCaps(default=of_operator).with_default(16) == TokenCaps(default=default)


@pytest.mark.parametrize(("of_key", "most"), [(None, 9), (0, 9), (20, 9), (4, 4)])
def test_the_smaller_cap_counts(of_key: int | None, most: int) -> None:
    """A key's cap and everybody's: 0 and None are none."""
    assert TokenCaps(most=9).with_key(of_key) == TokenCaps(most=most)


@pytest.mark.parametrize(
    ("stopping", "field"),
    [
        (StoppingParams(max_tokens=10), "stopping.max_tokens"),
        (StoppingParams(min_tokens=10), "stopping.min_tokens"),
    ],
)
def test_more_than_the_cap_is_refused_by_name(stopping: StoppingParams, field: str) -> None:
    """With the limit and what was asked for."""
    with pytest.raises(InvalidRequest, match="must be at most 9 here, got 10") as caught:
        TokenCaps(most=9).apply(stopping)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("asked", "of_key", "given"),
    [(7, None, 7), (7, 3, 3), (-7, 3, -4), (0, -20, -20), (-100, -20, -100)],
)
def test_requests_may_only_lower_their_keys_priority(
    asked: int, of_key: int | None, given: int
) -> None:
    """Or no key's priority would mean anything."""
    assert place_priority(asked, of_key) == given


async def test_caps_and_defaults_reach_the_target(tiny_folder) -> None:
    """Over the wire: the target is asked for the default, and more than the cap is refused."""
    settings = {"max_tokens": 9, "default_max_tokens": 4}
    async with gateway_with(tiny_folder, Script([5] * 20), **settings) as (gateway, target):
        assert len((await gateway.ask(pb.GenerateRequest(text="x"))).ids) == 4
        assert target.seen.requests[0].stopping.max_tokens == 4
        stopping = sampling_pb2.StoppingParams(max_tokens=10)
        with pytest.raises(grpc.aio.AioRpcError, match="at most 9 here") as caught:
            await gateway.ask(pb.GenerateRequest(text="x", stopping=stopping))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_default_deadline_is_for_those_who_name_none(tiny_folder) -> None:
    """A client's own deadline counts, up to the longest."""
    script = Script([5] * 9, hang_after=2)
    async with gateway_with(tiny_folder, script, default_timeout_s=0.3) as (gateway, target):
        started = time.monotonic()
        call = gateway.stub.Generate(pb.GenerateRequest(text="x"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started >= 0.25
        call = gateway.stub.Generate(pb.GenerateRequest(text="x"), timeout=30)
        await asyncio.sleep(0.5)
        assert not call.done()
        call.cancel()
        assert target.seen.time_remaining_s[1] > 20

"""The compose stack on a real engine: images from the working tree, containers, signals, DNS.

Cases of B37 (drafters come late, are scaled, die, move to another address) and B48 (compose down)
with the very files that users start.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from outrider.serving.channel import open_channel
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc, inference_pb2, inference_pb2_grpc
from protos.outrider.v1.sampling_pb2 import SamplingParams, StoppingParams
from tests.support.compose_stack import GRACE_S, ComposeStack, Container
from tests.support.docker_engine import engine_for_tests, why_no_engine
from tests.support.processes import is_serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # the first one builds the images
]

USED_WITHIN_S = 10.0
SHARED_WITHIN_S = 60.0
PROMPT = "one two three four one two three four one two three four"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    """The project with its images; gone afterwards, volumes included."""
    if reason := why_no_engine():
        pytest.skip(reason)
    with engine_for_tests() as engine:
        stack = ComposeStack(engine, tmp_path_factory.mktemp("compose"))
        try:
            stack.build()
            yield stack
        finally:
            stack.remove()


@pytest.fixture
def stack(built: ComposeStack) -> Iterator[ComposeStack]:
    """The project, of which nothing runs yet."""
    yield built
    built.compose("down", "--timeout", "1")


def request(max_tokens: int, number: int = 0) -> inference_pb2.GenerateRequest:
    """A greedy request that ends at its cap, with something to look up for an n-gram drafter."""
    return inference_pb2.GenerateRequest(
        text=f"{number} {PROMPT}",
        sampling=SamplingParams(temperature=0),
        stopping=StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def answer(
    channel: grpc.aio.Channel, max_tokens: int, number: int = 0
) -> tuple[list[int], inference_pb2.GenerateFinish]:
    """The ids of an answer, and its finish."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    messages = [each async for each in stub.Generate(request(max_tokens, number), timeout=120)]
    ids = [token.id for each in messages for token in each.chunk.tokens]
    assert messages[-1].HasField("finish") and len(ids) == max_tokens
    return ids, messages[-1].finish


async def proposed_by(drafter: Container) -> int:
    """What the drafter itself says of its work."""
    async with open_channel(f"{drafter.address}:50053") as channel:
        stub = draft_pb2_grpc.DraftStub(channel)
        status = await stub.GetStatus(draft_pb2.DraftGetStatusRequest(), timeout=5)
        return status.proposed_tokens


async def serves(drafter: Container) -> None:
    """Return when the drafter is ready."""
    async with asyncio.timeout(60), open_channel(f"{drafter.address}:50053") as channel:
        while not await is_serving(channel):
            await asyncio.sleep(0.1)


async def used_soon(drafter: Container) -> None:
    """It proposes something, within ten seconds from now."""
    before = await proposed_by(drafter)
    async with asyncio.timeout(USED_WITHIN_S):
        while await proposed_by(drafter) == before:
            await asyncio.sleep(0.2)


class Load:
    """Clients that ask the same questions again and again, and notice everything."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.answers = 0
        self._channel = channel
        self._expected: dict[int, list[int]] = {}

    async def run(self, number: int) -> None:
        """One client, for ever. The first answer says what all others must be."""
        while True:
            ids, _ = await answer(self._channel, 24, number)
            assert ids == self._expected.setdefault(number, ids)
            self.answers += 1


@contextlib.asynccontextmanager
async def light_load(channel: grpc.aio.Channel, clients: int = 2) -> AsyncIterator[Load]:
    """Some requests at a time while the block runs. A client that fails, fails the block."""
    load = Load(channel)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(load.run(number)) for number in range(clients)]
        yield load
        for task in tasks:
            task.cancel()


async def start(stack: ComposeStack, *services: str) -> None:
    """Containers that are healthy."""
    await asyncio.to_thread(stack.compose, "up", "--detach", "--wait", *services)


def test_images_hold_what_they_need_and_run_without_rights(stack: ComposeStack) -> None:
    """No torch but where a model runs, no compiler anywhere and yet compiled operations, no root,
    and nothing to write to; of all ports only the gateway's is published."""
    for name in ("gateway", "target", "draft-ngram", "models"):
        words = ["run", "--rm", "--entrypoint", "sh", stack.image(name), "-c"]
        found = stack.engine.docker(
            *words, "id -u; command -v gcc cc make; find / -xdev -name libtorch_cpu.so; true"
        ).split()
        assert found[0] == "10001"
        assert len(found) == (2 if name == "target" else 1), found
    stack.compose("up", "--detach", "--wait")
    assert "operations are compiled C++" in stack.compose("logs", "target")
    for service in ("gateway", "target", "draft"):
        (container,) = stack.containers(service)
        status = stack.engine.docker("exec", container.id, "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
        write = "touch /opt/outrider/x /var/cache/outrider/x 2>/dev/null && echo written; true"
        assert stack.engine.docker("exec", container.id, "sh", "-c", write) == ""
        ports = stack.engine.docker("port", container.id).split()
        published = [["50051/tcp", "->", stack.address], ["8080/tcp", "->", stack.http_address]]
        found = sorted(ports[i : i + 3] for i in range(0, len(ports), 3))
        assert found == (published if service == "gateway" else [])


async def test_down_ends_streams_well_and_every_service_with_status_0(stack: ComposeStack) -> None:
    """Streams that can end within the grace time do; the others end with a reason; nobody has to be
    killed, and it takes no longer than the two grace times and what their ends take."""
    await start(stack)
    async with open_channel(stack.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.Generate(request(each), timeout=120) for each in (16, 16, 4000)]
        for call in calls:
            assert (await call.read()).HasField("chunk")
        moment, started_s = stack.now(), time.monotonic()
        down = asyncio.create_task(asyncio.to_thread(stack.compose, "down"))
        *short, long = await asyncio.gather(*(read_to_the_end(call) for call in calls))
        await down
    took_s = time.monotonic() - started_s
    assert short == [(grpc.StatusCode.OK, True)] * 2
    assert long == (grpc.StatusCode.UNAVAILABLE, False)
    codes = stack.exit_codes_since(moment)
    assert codes == {"gateway": [0], "target": [0], "draft": [0]}
    assert took_s < 2 * (GRACE_S + 5)


async def read_to_the_end(call: grpc.aio.UnaryStreamCall) -> tuple[grpc.StatusCode, bool]:
    """The status of a stream, and whether it had a finish."""
    finished = False
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (message := await call.read()) is not grpc.aio.EOF:
            finished = message.HasField("finish")
    return await call.code(), finished


async def test_drafters_come_late_are_scaled_die_and_move(stack: ComposeStack) -> None:
    """The target is there first and serves alone. A drafter that comes is used soon; of three each
    gets its part; one that is killed costs no client anything and comes back; one that comes back
    at another address is found."""
    await start(stack, "gateway")
    async with open_channel(stack.address) as channel:
        _, finish = await answer(channel, 8)
        assert finish.speculation.drafted == 0
        async with light_load(channel) as load:
            await comes(stack)
            await is_scaled_to_three(stack)
            await one_is_killed(stack, load)
            await moves(stack)


async def comes(stack: ComposeStack) -> None:
    """The first drafter of all."""
    await asyncio.to_thread(stack.compose, "up", "--detach", "draft")
    (drafter,) = stack.containers("draft")
    await serves(drafter)
    await used_soon(drafter)


async def is_scaled_to_three(stack: ComposeStack) -> None:
    """At least 15 % of the work each, within a minute."""
    words = ["up", "--detach", "--wait", "--no-recreate", "--scale", "draft=3", "draft"]
    await asyncio.to_thread(stack.compose, *words)
    drafters = stack.containers("draft")
    assert len({each.address for each in drafters}) == 3
    before = [await proposed_by(each) for each in drafters]
    async with asyncio.timeout(SHARED_WITHIN_S):
        while True:
            work = [await proposed_by(each) for each in drafters]
            work = [now - then for now, then in zip(work, before, strict=True)]
            if sum(work) > 100 and min(work) >= 0.15 * sum(work):
                return
            await asyncio.sleep(0.5)


async def one_is_killed(stack: ComposeStack, load: Load) -> None:
    """Without a goodbye: it is started again, and used again."""
    victim = stack.containers("draft")[0]
    answers = load.answers
    stack.engine.docker("exec", victim.id, "sh", "-c", "kill -KILL -1")  # all but PID 1
    async with asyncio.timeout(60):
        while True:
            again = [each for each in stack.containers("draft") if each.id == victim.id]
            if again and again[0].restarts == victim.restarts + 1:
                break
            await asyncio.sleep(0.5)
    await serves(again[0])
    await used_soon(again[0])
    async with asyncio.timeout(60):
        while load.answers < answers + 4:
            await asyncio.sleep(0.2)


async def moves(stack: ComposeStack) -> None:
    """All are removed; one comes back while others sit at the addresses that were theirs."""
    before = {each.address for each in stack.containers("draft")}
    await asyncio.to_thread(stack.compose, "rm", "--stop", "--force", "draft")
    words = ["run", "--detach", "--rm", "--network", f"{stack.project}_inside"]
    words += ["--entrypoint", "sleep", stack.image("draft-ngram"), "300"]
    squatters = [stack.engine.docker(*words).strip() for _ in before]
    try:
        await asyncio.to_thread(stack.compose, "up", "--detach", "--scale", "draft=1", "draft")
        (drafter,) = stack.containers("draft")
        assert drafter.address not in before
        await serves(drafter)
        await used_soon(drafter)
    finally:
        stack.engine.docker("rm", "--force", *squatters)

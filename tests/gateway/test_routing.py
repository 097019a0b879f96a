"""Several targets behind one gateway: who gets a request, who takes over, what the client sees."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import pytest

from gateway.routing import TargetPool
from gateway.target_client import TargetLink
from outrider.serving.errors import EngineFailed, OutriderError, Overloaded, Unavailable
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2, target_pb2
from tests.support.gateways import Gateway, gateway_on, target_status, until
from tests.support.in_process import running_target
from tests.support.scripted_target import Script, ScriptedTarget, serving
from tests.support.tiny_models import make_tiny_model

REQUEST = pb.GenerateRequest(text="x")
IDS = list(range(5, 45))


def status_of(folder: Path, **more: object) -> target_pb2.TargetGetStatusResponse:
    """A target that can take over from its like."""
    status = target_status(folder)
    status.weights_fingerprint, status.numerics_id = "weights", "numerics"
    for name, value in more.items():
        setattr(status, name, value)
    return status


def links_of(gateway: Gateway) -> list[TargetLink]:
    """The gateway's targets."""
    return gateway.service._targets._links


@contextlib.asynccontextmanager
async def pool_of(
    folder: Path,
    scripts: Sequence[Script],
    statuses: Sequence[target_pb2.TargetGetStatusResponse] = (),
) -> AsyncIterator[tuple[Gateway, list[ScriptedTarget]]]:
    """A gateway with all of its scripted targets ready; nothing is held at the end."""
    statuses = statuses or [status_of(folder) for _ in scripts]
    async with contextlib.AsyncExitStack() as stack:
        targets = [
            await stack.enter_async_context(serving(script, status))
            for script, status in zip(scripts, statuses, strict=True)
        ]
        addresses = [target.address for target in targets]
        gateway = await stack.enter_async_context(gateway_on(folder, addresses))
        await until(lambda: all(link.info is not None for link in links_of(gateway)))
        yield gateway, targets
        await until(lambda: not any(link.num_held for link in links_of(gateway)))
        assert gateway.num_running == 0


def asked(targets: Sequence[ScriptedTarget]) -> list[int]:
    """How many requests each has got."""
    return [len(target.seen.requests) for target in targets]


async def refusal(gateway: Gateway, request: pb.GenerateRequest = REQUEST) -> grpc.StatusCode:
    """The status of a request that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.ask(request)
    return caught.value.code()


async def test_the_least_loaded_target_first(tiny_folder: Path) -> None:
    """What others run and wait for there counts, at once when a target becomes ready, and later
    within about a second."""
    statuses = [status_of(tiny_folder) for _ in range(2)]
    statuses[0].load.running, statuses[0].load.waiting = 3, 2
    async with pool_of(tiny_folder, [Script([5])] * 2, statuses) as (gateway, targets):
        for _ in range(4):
            await gateway.ask(REQUEST)
        assert asked(targets) == [0, 4]
        statuses[0].load.Clear()
        statuses[1].load.waiting = 1
        await until(lambda: [link.load for link in links_of(gateway)] == [0, 1], timeout_s=3)
        for _ in range(4):
            await gateway.ask(REQUEST)
        assert asked(targets) == [4, 4]


async def test_requests_that_come_together_are_spread(tiny_folder: Path) -> None:
    """A request holds its place while its prompt is tokenized, and a request for four choices holds
    four; what runs there is not counted a second time through the target's report."""
    gate = asyncio.Event()
    statuses = [status_of(tiny_folder) for _ in range(2)]
    scripts = [Script([5], gate=gate) for _ in range(2)]
    async with pool_of(tiny_folder, scripts, statuses) as (gateway, targets):
        big = asyncio.create_task(gateway.ask(pb.GenerateRequest(text="x", n=4)))
        await until(lambda: sum(asked(targets)) == 1)
        with_big = asked(targets).index(1)
        statuses[with_big].load.running = 4
        await asyncio.sleep(1.3)  # a report is in
        assert sorted(link.load for link in links_of(gateway)) == [0, 4]
        small = [asyncio.create_task(gateway.ask(REQUEST)) for _ in range(6)]
        await until(lambda: sum(asked(targets)) == 7)
        assert sorted(asked(targets)) == [2, 5]  # 4 + 1 against 5
        gate.set()
        assert [(await task).ids for task in small] == [[5]] * 6
        with pytest.raises(grpc.aio.AioRpcError):  # a scripted target answers one choice only
            await big


@pytest.mark.parametrize("error", [Unavailable("draining"), Overloaded("full", 1.0)])
async def test_a_refused_request_is_tried_once_elsewhere(
    tiny_folder: Path, error: OutriderError
) -> None:
    """Refused before the first token: one other target is asked, and no third one."""
    scripts = [Script([5, 6]) for _ in range(3)]
    async with pool_of(tiny_folder, scripts) as (gateway, targets):
        scripts[0].refuse = error
        for _ in range(3):
            assert (await gateway.ask(REQUEST)).ids == [5, 6]
        assert sum(asked(targets)) == 3 + len(targets[0].seen.requests)
        for script in scripts:
            script.refuse = error
        before = sum(asked(targets))
        assert await refusal(gateway) is error.code
        assert sum(asked(targets)) == before + 2


async def test_a_refusal_keeps_its_own_cause(tiny_folder: Path) -> None:
    """Where nobody else can be asked, the error says what the target said, and stands for itself
    in no other one."""
    async with pool_of(tiny_folder, [Script([5], refuse=Overloaded("full", 1.0))]) as (gateway, _):
        route = gateway.service._targets.route()
        request = target_pb2.TokenRequest(token_ids=[1])
        request.stopping.max_tokens = 1
        with pytest.raises(Overloaded) as caught:
            await anext(route.chunks(request, lambda: None, lambda address: None))
        assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
        route.close()


async def test_only_refusals_are_tried_elsewhere(tiny_folder: Path) -> None:
    """A failed step may be the request's own fault: no other target is made to fail."""
    scripts = [Script(IDS, refuse=EngineFailed("a step failed")) for _ in range(2)]
    async with pool_of(tiny_folder, scripts) as (gateway, targets):
        assert await refusal(gateway) is grpc.StatusCode.INTERNAL
        assert sum(asked(targets)) == 1


LOSSES = {
    "an error": lambda script: setattr(script, "failure", Unavailable("lost")),
    "no finish": lambda script: None,
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("after", [3, 6, 36])
async def test_a_lost_target_is_replaced(
    tiny_folder: Path, lose: Callable[[Script], None], block: int, after: int
) -> None:
    """The other target is told what was delivered and goes on: same ids and text, one finish, usage
    and draft counts as from one target."""
    scripts = [Script(IDS, block=block) for _ in range(2)]
    async with pool_of(tiny_folder, scripts) as (gateway, targets):
        whole = await gateway.ask(REQUEST)
        for script in scripts:
            script.fail_after = after
            lose(script)
        first = gateway.service._targets.ranked()[0]
        other = next(target for target in targets if target.address != first.address)
        other.script.fail_after = None
        answer = await gateway.ask(REQUEST)
        assert (answer.ids, answer.text) == (whole.ids, whole.text) == (IDS, whole.text)
        assert answer.finish.usage == whole.finish.usage
        assert answer.finish.reason == whole.finish.reason
        assert list(other.seen.requests[-1].resumed_token_ids) == IDS[:after]
        assert answer.finish.speculation.accepted == whole.finish.speculation.accepted
        per_position = answer.finish.speculation.accepted_per_position
        assert per_position == whole.finish.speculation.accepted_per_position


async def test_a_killed_target_is_replaced(tiny_folder: Path) -> None:
    """The connection is cut in the middle of several answers; each client gets its whole text."""
    scripts = [Script(IDS, delay_s=0.02) for _ in range(2)]
    async with pool_of(tiny_folder, scripts) as (gateway, targets):
        running = [asyncio.create_task(gateway.ask(REQUEST)) for _ in range(6)]
        await until(lambda: all(target.seen.tokens_sent > 20 for target in targets))
        await targets[0].stop()
        answers = await asyncio.gather(*running)
        assert all(answer.ids == IDS for answer in answers)
        assert asked(targets) == [3, 6]
        resumed = [request for request in targets[1].seen.requests if request.resumed_token_ids]
        assert len(resumed) == 3


async def test_several_losses_one_after_the_other(tiny_folder: Path) -> None:
    """Each target gives four tokens more and is lost: the answer goes round until it is whole."""
    scripts = [Script(IDS[:14]) for _ in range(2)]
    async with pool_of(tiny_folder, scripts) as (gateway, targets):

        async def play() -> None:
            """Both fail four tokens behind where they were resumed."""
            seen = 0
            while True:
                await asyncio.sleep(0)
                if sum(asked(targets)) > seen:
                    seen = sum(asked(targets))
                    for script in scripts:
                        script.fail_after = 4 * seen if seen < 4 else None

        scripts[0].fail_after = scripts[1].fail_after = 4
        player = asyncio.create_task(play())
        answer = await gateway.ask(REQUEST)
        player.cancel()
        assert answer.ids == IDS[:14]
        assert answer.finish.usage.completion_tokens == 14


OTHERS = {
    "other weights": {"weights_fingerprint": "others"},
    "other numerics": {"numerics_id": "others"},
    "too short": {"max_model_len": 20},
    "other ends": {"eos_token_ids": [7]},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
async def test_a_target_that_would_say_something_else_does_not_take_over(
    tiny_folder: Path, other: dict[str, object]
) -> None:
    """Only equal weights and numerics give the same text; without such a target: UNAVAILABLE."""
    statuses = [status_of(tiny_folder), status_of(tiny_folder)]
    for name, value in other.items():
        statuses[1].ClearField(name)
        if isinstance(value, list):
            getattr(statuses[1], name).extend(value)
        else:
            setattr(statuses[1], name, value)
    statuses[1].load.running = 9  # so that the first one is asked
    scripts = [Script(IDS, fail_after=3, failure=Unavailable("lost")), Script(IDS)]
    async with pool_of(tiny_folder, scripts, statuses) as (gateway, targets):
        assert await refusal(gateway) is grpc.StatusCode.UNAVAILABLE
        assert asked(targets) == [1, 0]


@pytest.mark.parametrize("failure", [EngineFailed("step"), Overloaded("too slow a reader", 1.0)])
async def test_what_is_no_loss_ends_the_answer(tiny_folder: Path, failure: OutriderError) -> None:
    """An error in the middle that is not the target's loss reaches the client as it is."""
    scripts = [Script(IDS, fail_after=3, failure=failure) for _ in range(2)]
    async with pool_of(tiny_folder, scripts) as (gateway, targets):
        assert await refusal(gateway) is failure.code
        assert sum(asked(targets)) == 1


async def test_several_choices_are_not_resumed(tiny_folder: Path) -> None:
    """A target cannot go on with several choices: UNAVAILABLE once one has a token."""
    scripts = [Script(IDS, fail_after=3, failure=Unavailable("lost")) for _ in range(2)]
    async with pool_of(tiny_folder, scripts) as (gateway, targets):
        request = pb.GenerateRequest(text="x", n=2)
        assert await refusal(gateway, request) is grpc.StatusCode.UNAVAILABLE
        assert sum(asked(targets)) == 1


async def test_a_client_that_leaves_is_left_by_the_second_target_too(tiny_folder: Path) -> None:
    """After a move a cancel ends the call where it runs now, and none is started after it."""
    scripts = [Script(IDS, delay_s=0.02, fail_after=3) for _ in range(2)]
    async with pool_of(tiny_folder, scripts) as (gateway, targets):
        call = gateway.stub.Generate(REQUEST)
        await call.read()
        for script in scripts:
            script.fail_after = 3 if scripts.index(script) == asked(targets).index(1) else None
        await until(lambda: sum(asked(targets)) == 2)
        call.cancel()
        await until(lambda: not any(target.seen.running for target in targets), timeout_s=1)
        assert sum(asked(targets)) == 2


async def test_unready_targets_are_left_out_and_taken_back(tiny_folder: Path) -> None:
    """NOT_SERVING: no request goes there; SERVING again: it has its share within a second. The same
    for a process that dies and, after a while, comes back at its address."""
    scripts, status = [Script([5]), Script([5])], status_of(tiny_folder)
    async with pool_of(tiny_folder, scripts) as (gateway, targets):
        links = links_of(gateway)
        await targets[0].set_serving(False)
        await until(lambda: links[0].info is None, timeout_s=1)
        for _ in range(4):
            await gateway.ask(REQUEST)
        assert asked(targets) == [0, 4]
        await targets[0].set_serving(True)
        await until(lambda: links[0].info is not None, timeout_s=1)
        await gateway.ask(REQUEST)
        assert asked(targets) == [1, 4]
        await targets[0].stop()
        await until(lambda: links[0].info is None, timeout_s=1)
        await asyncio.sleep(3)  # gRPC's own waits between attempts have grown
        port = int(targets[0].address.rpartition(":")[2])
        async with serving(Script([5]), status, port=port) as again:
            began = time.perf_counter()
            await until(lambda: links[0].info is not None, timeout_s=3)
            assert time.perf_counter() - began < 1.2
            for _ in range(2):
                await gateway.ask(REQUEST)
            assert len(again.seen.requests) == 1


async def test_a_target_that_does_not_answer_comes_last(tiny_folder: Path) -> None:
    """One that hangs keeps its connection; it gets nothing while another one answers."""
    scripts = [Script([5]), Script([5])]
    async with pool_of(tiny_folder, scripts) as (gateway, targets):
        scripts[0].hang_status = True
        await until(lambda: not links_of(gateway)[0].answers, timeout_s=4)
        for _ in range(4):
            await gateway.ask(REQUEST)
        assert asked(targets) == [0, 4]
        scripts[0].hang_status = False
        await until(lambda: links_of(gateway)[0].answers, timeout_s=4)


@pytest.mark.timeout(40)
async def test_a_name_is_all_of_its_addresses(tiny_folder: Path) -> None:
    """Each address behind a name is a target; new ones come, gone ones get nothing more but end
    what runs; a name that is not known for a moment changes nothing."""
    gate = asyncio.Event()
    status = status_of(tiny_folder)
    behind: set[str] = set()

    async def resolve(address: str) -> set[str]:
        return set(behind) or {address}

    async with serving(Script(IDS, gate=gate), status) as one, serving(Script([5]), status) as two:
        behind.add(one.address)
        pool = TargetPool(["targets.test:1"], status.token_table_hash, lambda ready: None, resolve)
        pool.start()
        try:
            await until(lambda: pool.ready)
            (link,) = pool._links
            route = pool.route()
            request = target_pb2.TokenRequest(token_ids=[1])
            request.stopping.max_tokens = 10
            chunks = route.chunks(request, lambda: None, lambda address: None)
            first = asyncio.create_task(anext(chunks))
            await until(lambda: one.seen.running == 1)
            behind.add(two.address)
            await until(lambda: len(pool.ranked()) == 2, timeout_s=5)
            assert {each.address for each in pool._links} == behind
            behind.clear()
            await asyncio.sleep(2.5)  # looked up again, without success
            assert len(pool.ranked()) == 2
            behind.add(two.address)
            await until(lambda: [each.address for each in pool.ranked()] == [two.address])
            gate.set()
            ids = [token.id for token in (await first).tokens]
            async for chunk in chunks:
                ids += [token.id for token in chunk.tokens]
            assert ids == IDS[:10]
            route.close()
            await until(lambda: not pool._leaving)
            assert link.num_held == 0
        finally:
            await pool.close()


async def test_who_is_about_to_call_is_waited_for(tiny_folder: Path) -> None:
    """A target leaves its name while a request that was given to it is tokenized still: it is asked
    all the same, and its connection is cut behind that."""
    status = status_of(tiny_folder)
    behind: set[str] = set()

    async def resolve(address: str) -> set[str]:
        return set(behind) or {address}

    async with serving(Script(IDS), status) as one, serving(Script([5]), status) as two:
        behind.add(one.address)
        pool = TargetPool(["targets.test:1"], status.token_table_hash, lambda ready: None, resolve)
        pool.start()
        try:
            await until(lambda: pool.ready)
            route = pool.route()  # as before the tokenizer gets its turn
            behind.clear()
            behind.add(two.address)
            await until(lambda: [e.address for e in pool.ranked()] == [two.address], timeout_s=5)
            request = target_pb2.TokenRequest(token_ids=[1])
            request.stopping.max_tokens = 10
            chunks = route.chunks(request, lambda: None, lambda address: None)
            ids = [token.id async for chunk in chunks for token in chunk.tokens]
            assert ids == IDS[:10]
            route.close()
            await until(lambda: not pool._leaving)
        finally:
            await pool.close()


@pytest.mark.timeout(90)
async def test_real_targets_take_over(tmp_path: Path) -> None:
    """Two targets with one model: when the one dies in the middle, the seeded text is the one that
    it would have been, log-probabilities included."""
    model = make_tiny_model(tmp_path / "tiny")
    request = pb.GenerateRequest(
        text="one river runs",
        sampling=sampling_pb2.SamplingParams(temperature=0.9, seed=11, frequency_penalty=0.5),
        stopping=sampling_pb2.StoppingParams(max_tokens=60, ignore_eos=True),
        logprobs=2,
        prompt_logprobs=0,
    )
    async with (
        running_target(model) as one,
        running_target(model) as two,
        gateway_on(model, [one.address, two.address]) as gateway,
    ):
        await until(lambda: all(link.info is not None for link in links_of(gateway)), timeout_s=20)
        whole = await gateway.ask(request, timeout_s=30)
        call = gateway.stub.Generate(request, timeout=30)
        stream = aiter(call)
        responses = [await anext(stream) for _ in range(9)]
        for target in (one, two):
            scheduler = target.service.batcher.scheduler
            if scheduler.running:
                for each in list(scheduler.running):
                    target.service.batcher._fail(each, Unavailable("killed"))
        responses += [response async for response in stream]
        chunks = [r.chunk for r in responses if r.HasField("chunk")]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        assert [(t.id, t.logprob) for t in tokens] == [(t.id, t.logprob) for t in whole.tokens]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        num_prompt = whole.finish.usage.prompt_tokens
        assert sum(len(chunk.prompt_tokens) for chunk in chunks) == num_prompt
        assert responses[-1].finish.usage.completion_tokens == 60
        loads = [(await target.status()).load.started for target in (one, two)]
        assert sorted(loads) in ([1, 2], [1, 3], [2, 2]) and sum(loads) == 3

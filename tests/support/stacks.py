"""Draft, target and gateway inside the test's event loop, on real ports, and a way to ask them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from draft_service.service import DraftService
from outrider.serving.server import listening
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import Answer, Gateway, gateway_on
from tests.support.in_process import Target, running_target

Speculation = sampling_pb2.SpeculationParams


@contextlib.asynccontextmanager
async def full_stack(
    model: Path, **target_settings: object
) -> AsyncIterator[tuple[Gateway, Target]]:
    """A ready gateway, with an n-gram drafter beside its target."""
    async with (
        listening(DraftService(DraftSettings(port=0)), "127.0.0.1", 0) as draft,
        running_target(model, f"127.0.0.1:{draft.port}", **target_settings) as target,
        gateway_on(model, [target.address]) as gateway,
    ):
        await gateway.wait_health(True)
        yield gateway, target


async def ask(gateway: Gateway, text: str, k: int, **stopping: object) -> Answer:
    """A greedy answer with exactly k drafts a round, 0 for none."""
    mode = Speculation.MODE_FIXED if k else Speculation.MODE_OFF
    request = pb.GenerateRequest(
        text=text,
        sampling=sampling_pb2.SamplingParams(temperature=0),
        stopping=sampling_pb2.StoppingParams(**{"ignore_eos": True, **stopping}),
        speculation=Speculation(mode=mode, max_draft_tokens=k if k else None),
    )
    answer = await gateway.ask(request, timeout_s=80)
    assert answer.finish.usage.completion_tokens == len(answer.ids)
    stats = answer.finish.speculation
    assert stats.drafted >= stats.accepted == sum(token.drafted for token in answer.tokens)
    assert stats.accepted == sum(stats.accepted_per_position)
    return answer

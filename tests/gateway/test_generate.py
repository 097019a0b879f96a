"""Generate over real gRPC, with a scripted target behind the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.tokenizer import ModelTokenizer
from protos.outrider.v1 import inference_pb2 as pb
from tests.support.gateways import gateway_with
from tests.support.scripted_target import Script

TEXT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture
def tokenizer(tiny_folder: Path) -> ModelTokenizer:
    """The folder's own."""
    return ModelTokenizer.load(tiny_folder)


@pytest.mark.parametrize("block", [1, 3, 100])
async def test_text_in_text_out(tiny_folder: Path, tokenizer: ModelTokenizer, block: int) -> None:
    """The client gets each token once and the text of all of them, however they were grouped."""
    ids = tokenizer.encode(TEXT)
    async with gateway_with(tiny_folder, Script(ids, block=block)) as (gateway, target):
        answer = await gateway.ask(pb.GenerateRequest(text="Say it:"))
    assert answer.text == TEXT
    assert answer.ids == ids
    assert answer.reason == "LENGTH"
    assert answer.finish.usage.prompt_tokens == len(tokenizer.encode("Say it:"))
    assert answer.finish.usage.completion_tokens == len(ids)
    assert answer.finish.speculation.accepted == sum(token.drafted for token in answer.tokens)
    (request,) = target.seen.requests
    assert list(request.token_ids) == tokenizer.encode("Say it:")

"""B22: characters whose bytes lie in several tokens.

Symptom: emoji and CJK characters arrive as replacement marks, finished characters are dropped, or
spaces between chunks vanish. Reported for Dynamo (ai-dynamo/dynamo issue 12630: a lookback window
broke characters at chunk borders), mlx-vlm (Blaizzy/mlx-vlm pull request 1778: a flush at a leading
space lost pending bytes) and the TensorRT-LLM backend (issue 332: spaces lost).

Right: the concatenated deltas are one decode of all ids, byte for byte; no delta holds half a
character; U+FFFD stands only where the full decode has it; nothing is taken back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.answer import Answer
from gateway.tokenizer import ModelTokenizer
from outrider.params import StoppingParams
from protos.outrider.v1 import inference_pb2 as pb
from tests.support.gateways import gateway_with
from tests.support.scripted_target import Script
from tests.support.stacks import ask, full_stack

TEXTS = {
    "family emoji": "a \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "flags": "\U0001f1e9\U0001f1ea\U0001f1f0\U0001f1f7 \U0001f3f4\U000e0067\U000e0062\U000e007f",
    "korean": "\uc548\ub155\ud558\uc138\uc694, \ub9cc\ub098\uc11c \ubc18\uac11\uc2b5\ub2c8\ub2e4.",
    "arabic": "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "combining": "e\u0301 n\u0303 o\u0302\u0323 Z\u0351\u036b\u0343\u036a\u0302\u036b",
    "indents": "def f():\n    if x:\n        return  1\n\n    pass\n",
    "replacement": "a real \ufffd mark\ufffd\ufffd",
    "nul": "a\x00b\x00",
    "crlf": "one\r\ntwo\r\n\r\n",
    "leading space": " leading and trailing ",
    "many emoji": "\U0001f600" * 12,
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> ModelTokenizer:
    """SmolLM2's: few of these characters are one token."""
    return ModelTokenizer.load(smollm2_folder)


@pytest.mark.parametrize("chunk", range(1, 9))
@pytest.mark.parametrize("name", TEXTS)
def test_chunks_of_ids(tokenizer: ModelTokenizer, name: str, chunk: int) -> None:
    """Ids in chunks of 1 to 8: the deltas are the text, and each one is whole characters."""
    text = TEXTS[name]
    ids = tokenizer.encode(text)
    answer = Answer(tokenizer.detokenizer(), StoppingParams(), [])
    deltas = [answer.push(ids[i : i + chunk]).text for i in range(0, len(ids), chunk)]
    deltas.append(answer.finish().text)
    assert "".join(deltas) == tokenizer.decode(ids) == text
    assert deltas[-1] == ""
    for delta in deltas:
        delta.encode()  # a lone surrogate would raise
        assert delta.count("\ufffd") == 0 or name == "replacement"


@pytest.mark.parametrize("name", TEXTS)
def test_cut_anywhere(tokenizer: ModelTokenizer, name: str) -> None:
    """An answer that the cap cuts inside a character ends as the full decode does."""
    ids = tokenizer.encode(TEXTS[name])
    for end in range(len(ids) + 1):
        answer = Answer(tokenizer.detokenizer(), StoppingParams(), [])
        text = "".join(answer.push([token_id]).text for token_id in ids[:end])
        assert tokenizer.decode(ids[:end]) == text + answer.finish().text
        assert tokenizer.decode(ids[:end]).startswith(text)


@pytest.mark.parametrize("block", [1, 2, 5, 9])
@pytest.mark.parametrize("name", ["family emoji", "korean", "many emoji"])
async def test_over_the_wire(
    smollm2_folder: Path, tokenizer: ModelTokenizer, name: str, block: int
) -> None:
    """A client that appends the deltas of the stream has the text, however drafts group it."""
    ids = tokenizer.encode(TEXTS[name])
    async with gateway_with(smollm2_folder, Script(ids, block=block)) as (gateway, _):
        answer = await gateway.ask(pb.GenerateRequest(text="x"))
    assert (answer.text, answer.ids) == (TEXTS[name], ids)
    assert "\ufffd" not in answer.text


async def repeated_characters(folder: Path, prompts: list[str], num: int, ks: list[int]) -> None:
    """The real model goes on with split characters, without drafts and with k of them."""
    async with full_stack(folder) as (gateway, _):
        for prompt in prompts:
            off = await ask(gateway, prompt, 0, max_tokens=num)
            whole = await gateway.stub.Detokenize(pb.DetokenizeRequest(ids=off.ids))
            assert off.text == whole.text
            for k in ks:
                on = await ask(gateway, prompt, k, max_tokens=num)
                assert (on.ids, on.text) == (off.ids, off.text)
                # The cap may cut a character: only the last delta can say so.
                assert "\ufffd" not in "".join(on.deltas[:-1])


FAMILIES = "\U0001f468\u200d\U0001f469\u200d\U0001f467 " * 12
SENTENCES = "\ub9cc\ub098\uc11c \ubc18\uac11\uc2b5\ub2c8\ub2e4. " * 12


@pytest.mark.timeout(120)
async def test_end_to_end(smollm2_folder: Path) -> None:
    """Twelve emoji as prompt, 12 tokens, without drafts and with 4 a round."""
    await repeated_characters(smollm2_folder, [FAMILIES], 12, [4])


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_end_to_end_in_full(smollm2_folder: Path) -> None:
    """Emoji and Korean, 60 tokens, without drafts and with 1, 4 and 8 a round."""
    await repeated_characters(smollm2_folder, [FAMILIES, SENTENCES], 60, [1, 4, 8])

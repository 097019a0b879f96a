"""B10: a block of accepted drafts that holds a stop string and the token cap.

Symptom: the answer ends with "length" and shows text behind the stop string, because the cap is
looked at before the stop. Reported for sglang (sgl-project/sglang issue 31599): an earlier stop in
the same block of drafts was masked.

Right: whatever ends the text first decides. A stop completed exactly by the last allowed token is a
stop. Drafts change nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.tokenizer import ModelTokenizer
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import Answer, gateway_with, write_tokenizer_folder
from tests.support.scripted_target import Script

WORDS = ["The", " quick", " brown", " fox", " jumps", " over", " the", " lazy", " dog", ".",
         " Pack", " my"]  # fmt: skip
STOP_AT = 3
K = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in which each of WORDS is one token."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def ids(folder: Path) -> list[int]:
    """The output of 12 tokens."""
    tokenizer = ModelTokenizer.load(folder)
    ids = [tokenizer.encode(word) for word in WORDS]
    assert all(len(one) == 1 for one in ids)
    return [one for (one,) in ids]


async def ask(folder: Path, script: Script, stopping: sampling_pb2.StoppingParams) -> Answer:
    """One answer; it never has more than max_tokens tokens, nor other usage than delivered."""
    async with gateway_with(folder, script) as (gateway, _):
        answer = await gateway.ask(pb.GenerateRequest(text="x", stopping=stopping))
    assert len(answer.ids) <= stopping.max_tokens
    assert answer.finish.usage.completion_tokens == len(answer.ids)
    return answer


@pytest.mark.parametrize("block", [1, K + 1])
@pytest.mark.parametrize("max_tokens", range(1, 13))
@pytest.mark.parametrize("stops", [["brown"], ["jumps", "brown"], ["brown", "jumps"]])
async def test_stop_string(
    folder: Path, ids: list[int], stops: list[str], max_tokens: int, block: int
) -> None:
    """One stop string by token 3, or two by tokens 3 and 5: the first one cuts the text."""
    stopping = sampling_pb2.StoppingParams(max_tokens=max_tokens, stop=stops)
    answer = await ask(folder, Script(ids, block=block), stopping)
    if max_tokens < STOP_AT:
        assert answer.reason == "LENGTH"
        assert (answer.ids, answer.text) == (ids[:max_tokens], "".join(WORDS[:max_tokens]))
    else:
        assert answer.reason == "STOP"
        assert (answer.ids, answer.text) == (ids[:STOP_AT], "The quick ")


@pytest.mark.parametrize("block", [1, K + 1])
@pytest.mark.parametrize("max_tokens", range(1, 13))
@pytest.mark.parametrize("kind", ["stop token id", "end of sequence"])
async def test_stop_token(
    folder: Path, ids: list[int], kind: str, max_tokens: int, block: int
) -> None:
    """A stop token as third token: its text is not part of the answer, the token is."""
    stopping = sampling_pb2.StoppingParams(max_tokens=max_tokens)
    script = Script(ids, block=block)
    if kind == "stop token id":
        stopping.stop_token_ids.append(ids[STOP_AT - 1])
    else:
        script = Script([*ids[: STOP_AT - 1], 2, *ids[STOP_AT:]], block=block, eos_ids=[2])
    answer = await ask(folder, script, stopping)
    num_tokens = min(max_tokens, STOP_AT)
    assert answer.ids == list(script.ids[:num_tokens])
    assert answer.text == "".join(WORDS[: min(num_tokens, STOP_AT - 1)])
    assert answer.reason == ("LENGTH" if max_tokens < STOP_AT else "STOP")


@pytest.mark.parametrize("block", [1, K + 1])
async def test_include_stop(folder: Path, ids: list[int], block: int) -> None:
    """With include_stop the text ends with the stop string, or with the stop token's text."""
    for stopping in (
        sampling_pb2.StoppingParams(max_tokens=12, include_stop=True, stop=["brow"]),
        sampling_pb2.StoppingParams(
            max_tokens=12, include_stop=True, stop_token_ids=[ids[STOP_AT - 1]]
        ),
    ):
        answer = await ask(folder, Script(ids, block=block), stopping)
        assert answer.text == ("The quick brow" if stopping.stop else "The quick brown")
        assert (answer.reason, answer.ids) == ("STOP", ids[:STOP_AT])

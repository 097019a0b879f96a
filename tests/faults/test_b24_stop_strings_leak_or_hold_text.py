"""B24: a part of a stop string reaches the client, or text that was held back is lost.

Symptom: the beginning of a stop string is streamed before the match is certain; or the opposite,
chunks stay empty for ever and the held text never comes. Reported for vLLM (vllm-project/vllm
issues 2577, 3574 and 13087), sglang (pull request 11462) and text-generation-inference
(issue 1254).

Right: with a match the stream is the text up to the match that begins first, no character more;
with a near miss all of it comes; never are more than (longest stop - 1) characters held; the
prompt takes no part.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from gateway.answer import Answer as PureAnswer
from gateway.tokenizer import ModelTokenizer
from outrider.params import StoppingParams
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.gateways import Answer, gateway_with, write_tokenizer_folder
from tests.support.scripted_target import Script

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs."
MIDDLE = "fox jumps over the"
BLOCKS = [1, 2, 3, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ModelTokenizer:
    """The folder's own."""
    return ModelTokenizer.load(folder)


async def ask(
    folder: Path,
    ids: list[int],
    block: int,
    *stops: str,
    include_stop: bool = False,
    prompt: str = "x",
) -> Answer:
    """The answer of a target that says `ids` in blocks."""
    stopping = sampling_pb2.StoppingParams(stop=stops, include_stop=include_stop)
    async with gateway_with(folder, Script(ids, block=block)) as (gateway, _):
        return await gateway.ask(pb.GenerateRequest(text=prompt, stopping=stopping))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("include_stop", [False, True])
async def test_match(
    folder: Path, tokenizer: ModelTokenizer, block: int, include_stop: bool
) -> None:
    """A stop of several tokens from the middle: text up to it, tokens up to its last one."""
    ids = tokenizer.encode(TEXT)
    answer = await ask(folder, ids, block, MIDDLE, include_stop=include_stop)
    assert answer.text == TEXT[: TEXT.index(MIDDLE) + len(MIDDLE) * include_stop]
    assert answer.reason == "STOP"
    assert answer.ids == ids[: len(answer.ids)]
    assert MIDDLE in tokenizer.decode(answer.ids)
    assert MIDDLE not in tokenizer.decode(answer.ids[:-1])


@pytest.mark.parametrize("block", BLOCKS)
async def test_near_miss(folder: Path, tokenizer: ModelTokenizer, block: int) -> None:
    """A stop that differs in its last character holds nothing back for good."""
    ids = tokenizer.encode(TEXT)
    answer = await ask(folder, ids, block, MIDDLE[:-1] + "!")
    assert (answer.text, answer.ids, answer.reason) == (TEXT, ids, "LENGTH")


async def test_near_miss_at_the_very_end(folder: Path, tokenizer: ModelTokenizer) -> None:
    """Text that waits for a stop when the answer ends is delivered with the end."""
    answer = await ask(folder, tokenizer.encode(TEXT), 1, "jugs. And")
    assert answer.text == TEXT


def test_held_text_is_bounded(tokenizer: ModelTokenizer) -> None:
    """At any moment at most (longest stop - 1) characters are missing from what was generated."""
    stops = (MIDDLE[:-1] + "!", "lazy cat")
    ids = tokenizer.encode(TEXT)
    answer = PureAnswer(tokenizer.detokenizer(), StoppingParams(stop=stops), [])
    shown = ""
    for end, token_id in enumerate(ids, start=1):
        shown += answer.push([token_id]).text
        held = tokenizer.decode(ids[:end])[len(shown) :]
        assert len(held) <= max(map(len, stops)) - 1
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("longer_first", [True, False])
async def test_two_stops(
    folder: Path, tokenizer: ModelTokenizer, block: int, longer_first: bool
) -> None:
    """Of two stops the one that begins earlier counts, also if the other lies inside it."""
    for shorter in ("over the", "jumps"):
        stops = [MIDDLE, shorter] if longer_first else [shorter, MIDDLE]
        answer = await ask(folder, tokenizer.encode(TEXT), block, *stops)
        assert answer.text == TEXT[: TEXT.index(MIDDLE)]


@pytest.mark.parametrize("block", BLOCKS)
async def test_the_prompt_takes_no_part(
    folder: Path, tokenizer: ModelTokenizer, block: int
) -> None:
    """A stop that would begin in the prompt and end in the answer is none."""
    ids = tokenizer.encode(TEXT)
    answer = await ask(folder, ids, block, "END of The quick", prompt="END of ")
    assert answer.text == TEXT


@pytest.mark.parametrize("stops", [["a"] * 17, [""], ["ok", ""]])
async def test_bad_stops_are_refused(folder: Path, stops: list[str]) -> None:
    """17 stops or an empty one: INVALID_ARGUMENT that names the field."""
    with pytest.raises(grpc.aio.AioRpcError, match=r"stopping\.stop") as caught:
        await ask(folder, [5], 1, *stops)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_sixteen_stops_are_fine(folder: Path, tokenizer: ModelTokenizer) -> None:
    """The limit itself is allowed, and any of them ends the text."""
    stops = [f"never {i}" for i in range(15)] + ["dog"]
    answer = await ask(folder, tokenizer.encode(TEXT), 3, *stops)
    assert answer.text == TEXT[: TEXT.index("dog")]

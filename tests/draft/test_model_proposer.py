"""The model proposer as the twin of a target: it proposes what the same model would generate."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest
import torch

from draft_service.proposers.model import ModelProposer
from draft_service.sessions import Opening, Session, Update
from outrider.engine.batch import Batch, BatchItem
from outrider.engine.memory import DoesNotFit
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from outrider.engine.sampling import TokenChooser
from outrider.params import SamplingParams
from outrider.serving.settings import DraftSettings, SettingsError
from protos.outrider.v1 import draft_pb2
from tests.support.draft_stream import (
    DraftStream,
    Follower,
    collect_all,
    dial,
    make_hello,
    make_open,
    open_stream,
    run_draft_service,
)
from tests.support.precision import chosen_dtype
from tests.support.tiny_models import make_tiny_model

VOCAB = 384
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 42},
    "penalised": {
        "temperature": 1.0, "seed": 7, "repetition_penalty": 1.3,
        "frequency_penalty": 0.5, "presence_penalty": 0.5, "top_k": 50,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_tiny_model(tmp_path_factory.mktemp("twin"), vocab_size=VOCAB)


class SlowDecoder:
    """The same model, one sequence, the whole text anew for each token: the truth here."""

    def __init__(self, folder: Path) -> None:
        self.runner = Runner(LlamaModel.load(folder, chosen_dtype()), num_blocks=32)

    def next_token(self, token_ids: list[int], prompt_len: int, **sampling: float) -> int:
        """What follows `token_ids`."""
        blocks = list(range(-(-len(token_ids) // 16)))
        logits = self.runner.forward(Batch([BatchItem(token_ids, 0, blocks, 1)]))
        chooser = TokenChooser(
            SamplingParams(**sampling),
            VOCAB,
            prompt_len=prompt_len,
            num_tokens=self.runner.model.config.num_tokens,
        )
        return chooser.choose(logits[0], token_ids)

    def continue_(
        self, token_ids: list[int], count: int, prompt_len: int, **sampling: float
    ) -> list[int]:
        """The next `count` tokens."""
        text = list(token_ids)
        for _ in range(count):
            text.append(self.next_token(text, prompt_len, **sampling))
        return text[len(token_ids) :]


@pytest.fixture(scope="module")
def truth(folder: Path) -> SlowDecoder:
    """The reference."""
    torch.set_num_threads(1)
    return SlowDecoder(folder)


def settings(folder: Path, **changes: object) -> DraftSettings:
    """A model drafter with the tiny model."""
    default = {"port": 0, "proposer": "model", "model": str(folder), "kv_tokens": 2048}
    return DraftSettings(**(default | {"dtype": chosen_dtype()} | changes))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of different lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("kv_tokens", [2048, 160])
@pytest.mark.timeout(60)
async def test_eight_sequences_at_once_get_what_the_target_would_say(
    folder: Path, truth: SlowDecoder, sampling: dict, kv_tokens: int
) -> None:
    """Also after rollbacks at random places, and in a cache too small for all of them.

    At the end nothing is left in the cache.
    """
    rng = random.Random(1)
    hello = make_hello(vocab_size=VOCAB)
    async with run_draft_service(settings(folder, kv_tokens=kv_tokens)) as draft:
        async with open_stream(draft.address, hello) as stream:
            followers = []
            for i, prompt in enumerate(prompts(8)):
                opening = make_open(prompt_len=len(prompt), max_len=512, **sampling)
                follower = Follower(stream, i + 1, opening)
                await follower.open(prompt, window=5)
                followers.append(follower)
            for _ in range(4):
                await collect_all(followers, 5)
                for follower in followers:
                    tail = follower.tail
                    expected = truth.continue_(
                        follower.confirmed, 5, follower.opening.prompt_len, **sampling
                    )
                    assert tail == expected
                    assert all(logprob <= 0 for logprob in follower.logprobs)
                    taken = tail[: rng.randrange(0, 6)]
                    if rng.random() < 0.5:
                        taken = [*taken, rng.randrange(3, VOCAB)]
                    await follower.confirm(taken)
            status = await draft.status()
            assert list(status.pool.integrity_errors) == []
            assert status.pool.used > 0
            assert (status.proposer, status.model) == ("model", folder.name)
            for follower in followers:
                await follower.finish()
            status = await draft.wait_until(lambda status: status.load.sessions == 0)
            assert status.pool.used == 0 and status.pool.free == status.pool.total
        assert list((await draft.status()).pool.integrity_errors) == []


async def test_a_stream_that_dies_in_the_middle_gives_all_blocks_back(folder: Path) -> None:
    """The running step cannot keep them."""
    async with run_draft_service(settings(folder)) as draft:
        for _ in range(3):
            async with open_stream(draft.address, make_hello(vocab_size=VOCAB)) as stream:
                for i, prompt in enumerate(prompts(8)):
                    await Follower(stream, i + 1, make_open(len(prompt), 512)).open(prompt, 30)
                await stream.receive()
            status = await draft.wait_until(lambda status: status.streams == 0)
            assert (status.load.sessions, status.pool.used) == (0, 0)
            assert list(status.pool.integrity_errors) == []


@pytest.mark.parametrize(("dtype", "precision"), [("auto", "int8"), ("float32", "float32")])
async def test_status_says_in_which_precision_it_drafts(
    folder: Path, dtype: str, precision: str
) -> None:
    """Never "auto"."""
    async with run_draft_service(settings(folder, dtype=dtype)) as draft:
        assert (await draft.status()).precision == precision


async def test_other_token_tables_are_refused_with_both_hashes(folder: Path) -> None:
    """The target learns why, and an empty hash matches."""
    async with run_draft_service(settings(folder)) as draft:
        async with open_stream(draft.address) as stream:
            ours = stream.hello.token_table_hash
            assert len(ours) == 32
            assert stream.hello.vocab_size == VOCAB
        async with open_stream(draft.address, make_hello(token_table_hash=ours)) as stream:
            assert stream.hello.weights_fingerprint
        other = bytes(range(32))
        async with dial(draft.address) as call:
            await call.write(draft_pb2.SpeculateRequest(hello=make_hello(token_table_hash=other)))
            code, message = await DraftStream(call).status()
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert other.hex() in message and ours.hex() in message


def make_session(tokens: list[int], window: int, **facts: object) -> Session:
    """A greedy sequence with its prefix."""
    sampling = SamplingParams(temperature=0.0)
    session = Session(1, 1, Opening(len(tokens), 512, sampling, **facts))
    session.apply(Update(1, 1, 1, 0, tokens, window))
    return session


@pytest.fixture
async def proposer(folder: Path):
    """A proposer without a service around it."""
    made = await ModelProposer.load(settings(folder))
    yield made
    made.shutdown()


async def fill(proposer: ModelProposer, session: Session) -> list[int]:
    """Step until the session wants no more; its tail."""
    while session.wants_tokens:
        await proposer.propose([session])
    return session.token_ids[session.confirmed_len :]


@pytest.mark.parametrize("other", [True, False])
async def test_an_update_during_a_step_is_not_lost(
    proposer: ModelProposer, truth: SlowDecoder, other: bool
) -> None:
    """Whether it agrees with the tail, goes past it or contradicts it."""
    prompt = prompts(1, seed=3)[0]
    expected = truth.continue_(prompt, 12, len(prompt), temperature=0.0)
    for confirmed in range(5):
        session = make_session(prompt, window=4)
        proposer.open(session)
        await proposer.propose([session])
        await proposer.propose([session])
        step = asyncio.create_task(proposer.propose([session]))
        await asyncio.sleep(0)
        tokens = expected[:confirmed]
        if other:
            tokens = [*tokens, (expected[confirmed] + 1) % VOCAB]
        session.apply(Update(1, 1, 2, len(prompt), tokens, 4))
        await step
        tail = await fill(proposer, session)
        assert tail == truth.continue_(prompt + tokens, 4, len(prompt), temperature=0.0)
        session.closed = True
        proposer.close(session)
    assert proposer.pool().free == proposer.pool().total


async def test_a_sequence_that_ends_during_a_step_frees_its_blocks(
    proposer: ModelProposer,
) -> None:
    """Its result is dropped, and the others of the step are served."""
    leaving, staying = make_session([5, 6, 7], 4), make_session([8, 9], 4)
    proposer.open(leaving)
    proposer.open(staying)
    step = asyncio.create_task(proposer.propose([leaving, staying]))
    await asyncio.sleep(0)
    leaving.closed = True
    proposer.close(leaving)
    assert await step == [staying]
    assert len(staying.token_ids) == 3
    assert proposer.pool().integrity_errors == ()


async def test_a_smaller_target_vocabulary_is_kept_to(
    proposer: ModelProposer, truth: SlowDecoder
) -> None:
    """Ids at or above it are never proposed, as if the model did not have them."""
    prompt = prompts(1, seed=5)[0]
    plain = truth.continue_(prompt, 8, len(prompt), temperature=0.0)
    limit = sorted(plain)[4]
    session = make_session([min(token, limit - 1) for token in prompt], 8, vocab_size=limit)
    proposer.open(session)
    tail = await fill(proposer, session)
    assert len(tail) == 8
    assert max(tail) < limit


async def test_it_stops_behind_a_stop_token(proposer: ModelProposer, truth: SlowDecoder) -> None:
    """The tail ends with it, and goes on when the target has gone past it."""
    prompt = prompts(1, seed=6)[0]
    expected = truth.continue_(prompt, 4, len(prompt), temperature=0.0)
    stop = next(token for i, token in enumerate(expected) if i and token not in expected[:i])
    end = expected.index(stop) + 1
    session = make_session(prompt, 4, stop_token_ids=frozenset({stop}))
    proposer.open(session)
    assert await fill(proposer, session) == expected[:end]
    session.apply(Update(1, 1, 2, len(prompt), expected[:end], 1))
    assert len(await fill(proposer, session)) == 1


async def test_a_missing_model_is_said_at_start() -> None:
    """The message names the setting."""
    with pytest.raises(SettingsError, match="model"):
        await ModelProposer.load(DraftSettings(proposer="model"))


async def test_a_cache_larger_than_memory_is_refused_at_start(folder: Path) -> None:
    """Before anything is served, by the setting's name: it is not backed by memory until used."""
    with pytest.raises(DoesNotFit, match=f"kv_tokens {2**40} needs .* MiB are free"):
        await ModelProposer.load(settings(folder, kv_tokens=2**40))


async def test_a_cache_too_small_for_a_step_does_not_spin(folder: Path) -> None:
    """What can never be computed is told as "nothing to propose", once, and asked no more."""
    proposer = await ModelProposer.load(settings(folder, kv_tokens=16))
    try:
        session = Session(1, 1, Opening(17, 512))
        proposer.open(session)
        session.apply(Update(1, 1, 1, 0, [5] * 17, window=4))
        assert await proposer.propose([session]) == [session]
        assert not session.wants_tokens
        assert session.take_unsent().tokens == []
    finally:
        proposer.shutdown()

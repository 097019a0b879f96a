"""B19. A draft whose vocabulary is not the target's.

Symptom: a drafter is refused although only the padding of its logits differs; or one with another
tokenizer is accepted, and garbage, NaN or a crash follows; or ids that stand for no token get into
a text, because the logits are padded.

Right: the same tokens with other padding are accepted. Other tokens are refused at the handshake,
with both hashes named, and the target serves without that drafter and says so. Ids and
distributions that cannot be are no draft: the text stays, a counter rises, nothing breaks. No text
ever holds an id behind the last token.

Reported to vLLM (7252, 10913: refused for padding; 13175: padding sampled); llama.cpp accepted
other tokenizers in silence until its change 3812.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.engine.fingerprints import token_table_hash
from outrider.serving.settings import DraftSettings
from protos.outrider.v1 import draft_pb2, sampling_pb2, target_pb2
from tests.support.draft_scripts import Drafting, Mute, Perfect, Reply, ScriptedSequence
from tests.support.draft_stream import run_draft_service
from tests.support.in_process import Target, running_target
from tests.support.precision import chosen_dtype
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_models import make_tiny_model, save_tokenizer
from tests.support.token_requests import make_request, random_prompts, wait_for_drafters
from tests.support.token_streams import assert_counts_balance, wait_until

VOCAB_SIZE = 384
PADDED_SIZE = 512
NUM_TOKENS = 40
K = 4
(PROMPT,) = random_prompts([21], 300, seed=19)
OTHER_HASH = bytes(range(32))


def request(k: int = 0) -> target_pb2.TokenRequest:
    """Forty greedy tokens."""
    return make_request(PROMPT, NUM_TOKENS, k=k)


def rejection_request(k: int = 0) -> target_pb2.TokenRequest:
    """The same, sampled, and drafts checked by their distributions."""
    request = make_request(PROMPT, NUM_TOKENS, k=k, temperature=0.8, seed=3)
    request.speculation.verification = sampling_pb2.SpeculationParams.VERIFICATION_REJECTION
    return request


@contextlib.asynccontextmanager
async def stage_on(model: Path) -> AsyncIterator[tuple[Target, ScriptedDrafter]]:
    """A target and a drafter, which has no drafts until it is told to."""
    async with (
        ScriptedDrafter(Mute()) as drafter,
        running_target(model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        yield target, drafter


async def is_serving(target: Target) -> bool:
    """What the health service says."""
    async with grpc.aio.insecure_channel(target.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="outrider.v1.Target"), timeout=5
        )
        return answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_other_padding_is_accepted(tiny_model: Path) -> None:
    """A drafter with more logits than the target, behind the same tokens: its drafts are used."""
    known: dict[tuple[int, ...], list[int]] = {}
    hello = draft_pb2.Hello(vocab_size=PADDED_SIZE, token_table_hash=token_table_hash(tiny_model))
    async with (
        ScriptedDrafter(Drafting(Perfect(known)), hello=hello) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):
        await wait_for_drafters(target)
        known[tuple(PROMPT)] = off = await target.ids(request())
        answer = await target.answer(request(K))
        assert answer.ids == off
        assert answer.speculation.accepted == answer.speculation.drafted > 0
        assert (await target.status()).state == "serving"


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 32_000])
async def test_other_tokens_are_refused(tiny_model: Path, vocab_size: int) -> None:
    """Whatever the size: no draft is asked for, both hashes are named, and the target serves."""
    hello = draft_pb2.Hello(vocab_size=vocab_size, token_table_hash=OTHER_HASH)
    async with (
        ScriptedDrafter(Drafting(Perfect({})), hello=hello) as drafter,
        running_target(tiny_model, drafters=drafter.address) as target,
    ):

        async def refused() -> bool:
            return (await target.status()).drafters[0].state == "refused"

        await wait_until(refused, 5)
        off = await target.ids(request())
        answer = await target.answer(request(K))
        assert answer.ids == off
        assert answer.speculation.drafted == 0
        status = await target.status()
        reason = status.drafters[0].reason
        assert OTHER_HASH.hex() in reason
        assert token_table_hash(tiny_model).hex() in reason
        assert status.state == "degraded"
        assert status.drafters[0].sequences == 0
        assert await is_serving(target)
        assert drafter.record.updates == []


class Bad:
    """Two right drafts, spoiled by `make`; and then that there is nothing more to come."""

    def __init__(self, known: Sequence[int], make: Callable[[draft_pb2.Proposal], None]) -> None:
        self._known = known
        self._make = make
        self.num_tokens = 0

    def answer(self, sequence: ScriptedSequence) -> list[Reply]:
        if not sequence.window:
            return []
        place = len(sequence.confirmed)
        index = place - sequence.opening.prompt_len
        proposal = sequence.proposal(place, self._known[index : index + 2])
        self._make(proposal)
        self.num_tokens += len(proposal.tokens)
        proposals = [proposal, sequence.proposal(place, [])]
        return [Reply(draft_pb2.SpeculateResponse(proposals=proposals))]


BAD_IDS = [VOCAB_SIZE, VOCAB_SIZE + 1, 50_000, 2**31 - 1, 2**32 - 1]


@pytest.mark.parametrize("bad_id", BAD_IDS)
@pytest.mark.parametrize("place", [0, 2])
async def test_ids_that_are_no_tokens(tiny_model: Path, bad_id: int, place: int) -> None:
    """Alone, or behind right drafts: the whole proposal counts as none. (An id of -1 has no form on
    the wire but that of the largest one.)"""
    async with stage_on(tiny_model) as (target, drafter):
        off = await target.ids(request())
        drafter.behaviour = bad = Bad(off, lambda each: each.tokens.insert(place, bad_id))
        await check_unused(target, bad, request(K), off)


def sparse(ids: Sequence[int], probs: Sequence[float]) -> draft_pb2.SparseProbs:
    """One distribution."""
    return draft_pb2.SparseProbs(ids=ids, probs=probs)


BAD_PROBS: dict[str, Callable[[int], draft_pb2.SparseProbs]] = {
    "as long as a padded vocabulary": lambda token: sparse(range(49_280), [1 / 49_280] * 49_280),
    "a hundred entries": lambda token: sparse([token, *range(300, 399)], [0.01] * 100),
    "empty": lambda token: sparse([], []),
    "more ids than values": lambda token: sparse([token, 5], [1.0]),
    "more values than ids": lambda token: sparse([token], [0.5, 0.5]),
    "sum of two": lambda token: sparse([token], [2.0]),
    "sum of a half": lambda token: sparse([token], [0.5]),
    "negative": lambda token: sparse([token, 5], [1.5, -0.5]),
    "not a number": lambda token: sparse([token], [float("nan")]),
    "infinite": lambda token: sparse([token], [float("inf")]),
    "an id twice": lambda token: sparse([token, token], [0.5, 0.5]),
    "without the token": lambda token: sparse([token + 1], [1.0]),
    "the token at zero": lambda token: sparse([token, 5], [0.0, 1.0]),
}


@pytest.mark.parametrize("name", BAD_PROBS)
async def test_distributions_that_are_none(tiny_model: Path, name: str) -> None:
    """Wrong lengths, sums and values: such drafts count as none, so the text is that of OFF."""

    def spoil(proposal: draft_pb2.Proposal) -> None:
        proposal.sparse_probs.extend(BAD_PROBS[name](token) for token in proposal.tokens)

    async with stage_on(tiny_model) as (target, drafter):
        off = await target.ids(rejection_request())
        drafter.behaviour = bad = Bad(off, spoil)
        await check_unused(target, bad, rejection_request(K), off)


async def test_distributions_over_ids_that_are_no_tokens(tiny_model: Path) -> None:
    """Half of what the drafter drew from lies behind the vocabulary: the token itself is possible,
    so it counts, and nothing else of that distribution can get into the text."""
    async with stage_on(tiny_model) as (target, drafter):
        off = await target.ids(rejection_request())

        def spoil(proposal: draft_pb2.Proposal) -> None:
            for token in proposal.tokens:
                proposal.sparse_probs.append(sparse([token, VOCAB_SIZE + 7], [0.5, 0.5]))

        drafter.behaviour = Bad(off * 2, spoil)
        answer = await target.answer(rejection_request(2))
        assert len(answer.ids) == NUM_TOKENS
        assert max(answer.ids) < VOCAB_SIZE
        assert (await target.status()).load.failed == 0


async def check_unused(
    target: Target, bad: Bad, request: target_pb2.TokenRequest, off: Sequence[int]
) -> None:
    """The text is that of OFF, none of the drafts was verified, and each is counted."""
    answer = await target.answer(request)
    assert answer.ids == list(off)
    assert answer.speculation.drafted == 0
    status = await target.status()
    assert bad.num_tokens > 0
    assert status.speculation.frames["malformed"] > 0
    assert status.speculation.unused["malformed"] > 0
    assert_counts_balance(status)
    assert status.drafters[0].state == "ready"


NO_TOKEN = 400
"""An id of the padded model that stands for no token."""
UNLIKELY = {"temperature": 3.0, "seed": 19, "repetition_penalty": 1.2, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def padded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokens behind 512 logits; a random model likes all of them equally."""
    folder = tmp_path_factory.mktemp("models") / "padded"
    make_tiny_model(folder, vocab_size=PADDED_SIZE)
    save_tokenizer(folder, VOCAB_SIZE)
    return folder


@pytest.mark.parametrize("sampling", [{}, UNLIKELY], ids=["greedy", "hot"])
async def test_padding_never_gets_into_a_text(
    tiny_model: Path, padded_model: Path, sampling: dict[str, float]
) -> None:
    """A target with more logits than tokens, with a draft that has its own weights, and with one
    that has less padding: no id behind the last token, though a prompt may hold one."""
    num_tokens = max(token_table(padded_model)) + 1
    prompt = [*PROMPT, NO_TOKEN]
    for draft in (padded_model, tiny_model):
        settings = DraftSettings(port=0, proposer="model", model=str(draft), dtype=chosen_dtype())
        async with (
            run_draft_service(settings) as drafter,
            running_target(padded_model, drafters=drafter.address) as target,
        ):
            await wait_for_drafters(target)
            off = await target.ids(make_request(prompt, 60, **sampling))
            answer = await target.answer(make_request(prompt, 60, k=K, **sampling))
            assert answer.ids == off
            assert max(off) < num_tokens <= VOCAB_SIZE < NO_TOKEN
            stats = answer.speculation
            if draft == padded_model:
                assert stats.accepted >= 0.99 * stats.drafted > 0
            assert stats.drafted > 0
            assert await drafter.is_serving()


def token_table(folder: Path) -> list[int]:
    """The ids that stand for tokens."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    return [*tokenizer["model"]["vocab"].values()]

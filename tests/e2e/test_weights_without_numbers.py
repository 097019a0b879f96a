"""Weights that give no numbers: refused at the start, and a drafter's sequences end alone later."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.batch import DraftLoop
from draft_service.proposers.model import ModelProposer
from draft_service.sessions import Opening, Session, Update
from outrider.model_error import ModelError
from outrider.params import SamplingParams
from outrider.serving.errors import EngineFailed
from outrider.serving.settings import DraftSettings
from tests.support.in_process import running_target
from tests.support.precision import chosen_dtype
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(120)  # transformers takes long to load on a busy machine
WAIT_S = 30.0
BAD_TOKEN = 7


def draft_settings(folder: Path) -> DraftSettings:
    """A model drafter."""
    return DraftSettings(
        port=0, proposer="model", model=str(folder), dtype=chosen_dtype(), kv_tokens=1024, threads=1
    )


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A model whose last norm holds NaN, in a file that is well otherwise."""
    folder = make_tiny_model(tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


async def test_a_target_refuses_them_at_the_start(damaged: Path) -> None:
    """Before it serves anybody, and by the model's name."""
    with pytest.raises(ModelError, match=r"damaged: 384 of 384 logits .* not finite"):
        async with running_target(damaged):
            pass


async def test_a_drafter_refuses_them_at_the_start(damaged: Path) -> None:
    """As a target does."""
    with pytest.raises(ModelError, match=r"damaged: 384 of 384 logits .* not finite"):
        await ModelProposer.load(draft_settings(damaged))


class Listener:
    """What a stream does with its sequences, without a wire."""

    def __init__(self, proposer: ModelProposer) -> None:
        self._proposer = proposer
        self.full: list[Session] = []
        self.dropped: list[Session] = []
        self.changed = asyncio.Event()

    def tell(self, session: Session) -> None:
        """It has got tokens."""
        if not session.wants_tokens:
            self.full.append(session)
            self.changed.set()

    def drop(self, session: Session) -> None:
        """It gets no more."""
        session.closed = True
        self._proposer.close(session)
        self.dropped.append(session)
        self.changed.set()


async def test_a_drafter_whose_model_goes_bad_later(tmp_path: Path) -> None:
    """Only a sequence with the bad token ends, and a model that is bad for all ends the loop."""
    folder = make_tiny_model(tmp_path / "model", tied_head=False)
    proposer = await ModelProposer.load(draft_settings(folder))
    loop, listener = DraftLoop(proposer), Listener(proposer)
    running = asyncio.create_task(loop.run())

    def offer(sequence_id: int, tokens: list[int]) -> Session:
        opening = Opening(len(tokens), 512, SamplingParams(temperature=0.0))
        session = Session(sequence_id, 1, opening)
        proposer.open(session)
        session.apply(Update(sequence_id, 1, 1, 0, tokens, window=4))
        loop.offer(session, listener)
        return session

    try:
        proposer._runner.model._embedding[BAD_TOKEN] = torch.nan
        good, bad = offer(1, [3, 4, 5]), offer(2, [3, 4, BAD_TOKEN])
        async with asyncio.timeout(WAIT_S):
            while not (listener.full and listener.dropped):
                listener.changed.clear()
                await listener.changed.wait()
        assert (listener.full, listener.dropped) == ([good], [bad])
        assert len(good.token_ids) == 3 + 4 and bad.token_ids == [3, 4, BAD_TOKEN]
        proposer._runner.model._final_norm.fill_(torch.nan)
        for number in (3, 4, 5):
            listener.changed.clear()
            session = offer(number, [3, 4])
            await asyncio.wait_for(listener.changed.wait(), WAIT_S)
            assert listener.dropped[-1] is session
        with pytest.raises(EngineFailed, match="3 steps failed in a row: the best logit is nan"):
            await asyncio.wait_for(running, WAIT_S)
    finally:
        running.cancel()
        proposer.shutdown()

"""Proposes what a small model would say, for all sequences in one batch a step.

It chooses as the target does: same filters, same noise of the same seed at the same positions. So
it guesses right wherever the two models agree closely enough, for sampled text too. Where the
target checks by rejection, it draws with noise of its own and says from what. The event loop plans
and commits, the device thread computes; an update that comes meanwhile costs one step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import structlog
import torch

from draft_service.proposers.base import PoolReport, ProposerIdentity
from draft_service.proposers.cache_plan import CachePlan, Share
from draft_service.sessions import Opening, Session
from outrider.engine.batch import Batch
from outrider.engine.block_pool import BLOCK_SIZE, BlockPool
from outrider.engine.choosing import Rows, choose_tokens, token_logprobs
from outrider.engine.config import ModelConfig
from outrider.engine.device import free_bytes
from outrider.engine.fingerprints import token_table_hash
from outrider.engine.memory import PoolSize
from outrider.engine.model import LlamaModel
from outrider.engine.numerics import prepare_cpu
from outrider.engine.rejection import draw_draft
from outrider.engine.runner import Runner
from outrider.engine.sampling import BadLogits, TokenChooser, logprobs
from outrider.engine.sparse_probs import SparseProbs
from outrider.models.resolve import display_name, resolve
from outrider.serving.cores import usable_cores
from outrider.serving.device import DeviceThread
from outrider.serving.memory import give_back_memory
from outrider.serving.settings import DraftSettings, SettingsError

log = structlog.get_logger(__name__)

STEP_TOKENS = 256
"""Most tokens of a step: what a long prefix may take before the others get their next token."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Guess:
    """One token."""

    token: int
    logprob: float
    probs: tuple[SparseProbs, ...] = ()
    """What it was drawn from, where the target wants to know."""


class ModelProposer:
    """A model with a paged cache of its own."""

    def __init__(
        self,
        runner: Runner,
        identity: ProposerIdentity,
        device: DeviceThread,
        *,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        self._runner = runner
        self._identity = identity
        self._device = device
        pool = BlockPool(runner.cache.num_blocks, runner.cache.block_size)
        self._plan = CachePlan(pool, step_tokens, identity.vocab_size)
        self._choosers: dict[Session, TokenChooser] = {}

    @classmethod
    async def load(cls, settings: DraftSettings) -> ModelProposer:
        """Load the model that the settings name, on the device thread, and warm it."""
        if not settings.model:
            raise SettingsError("model must name a model or folder when proposer is model")
        device = DeviceThread("draft-device")
        try:
            runner, identity = await device.run(lambda: _load(settings))
        except BaseException:
            device.close()
            raise
        return cls(runner, identity, device)

    @property
    def identity(self) -> ProposerIdentity:
        """The model's name, hashes and size."""
        return self._identity

    def open(self, session: Session) -> None:
        """Prepare the sequence's settings."""
        self._plan.open(session)
        self._choosers[session] = _chooser(session.opening, self._runner.model.config)

    def close(self, session: Session) -> None:
        """Give the sequence's blocks back."""
        self._plan.close(session)
        del self._choosers[session]

    async def propose(self, sessions: Sequence[Session]) -> list[Session]:
        """One forward: a token for each session whose prefix it completes."""
        shares = self._plan.plan(sessions)
        if not shares:
            # Asked again, the plan would be as empty: they wait for their next update.
            log.warning("the cache is too small for a step", sequences=len(sessions))
            for session in sessions:
                session.dry = True
            return list(sessions)
        choosers = [self._choosers[share.session] for share in shares]
        started_s = time.monotonic()
        found = await self._device.run(lambda: _compute(self._runner, shares, choosers))
        took_s = time.monotonic() - started_s
        changed = []
        for share, choice in zip(shares, found, strict=True):
            session = share.session
            if not self._plan.commit(share):
                continue
            if choice is None:
                session.dry = True
            else:
                session.extend([choice.token], [choice.logprob], took_s, choice.probs)
            changed.append(session)
        return changed

    def pool(self) -> PoolReport | None:
        """The paged cache, checked now."""
        kv_dtype, block_bytes = self._runner.model.kv_dtype, self._runner.cache.block_bytes
        return dataclasses.replace(self._plan.report(), kv_dtype=kv_dtype, block_bytes=block_bytes)

    def shutdown(self) -> None:
        """The running step ends, and the thread with it."""
        self._device.close()


def _chooser(opening: Opening, model: ModelConfig) -> TokenChooser:
    """The sequence's settings for the ids that both models have."""
    vocab_size = min(model.vocab_size, opening.vocab_size or model.vocab_size)
    bias = tuple((i, value) for i, value in opening.sampling.logit_bias if i < vocab_size)
    return TokenChooser(
        dataclasses.replace(opening.sampling, logit_bias=bias),
        vocab_size,
        prompt_len=opening.prompt_len,
        min_tokens=opening.min_tokens,
        stop_token_ids=opening.stop_token_ids,
        num_tokens=model.num_tokens,
    )


def _compute(
    runner: Runner, shares: Sequence[Share], choosers: Sequence[TokenChooser]
) -> list[_Guess | None]:
    """Forward all shares and choose where a prefix ends. Runs on the device thread.

    None where the prefix does not end, or where there is no token to take.
    """
    logits, ops = runner.forward(Batch([share.item for share in shares])), runner.model.ops
    counts = [share.item.num_logits for share in shares]
    row_of = {i: sum(counts[:i]) for i, count in enumerate(counts) if count}
    wanted = {
        i: Rows(logits, choosers[i], shares[i].tokens_before, first=row)
        for i, row in row_of.items()
        if not shares[i].session.opening.sends_probs
    }
    chosen = choose_tokens(list(wanted.values()), ops.choose, on_device=ops.chooses_on_device)
    found: dict[int, _Guess] = {}
    tokens: dict[int, int] = {}
    for i, choice in zip(wanted, chosen, strict=True):
        if isinstance(choice, list):
            tokens[i] = choice[0]
        elif not isinstance(choice, BadLogits):
            raise choice
        else:
            _note(choice, logits[row_of[i]])
    rows = [row_of[i] for i in tokens]
    values = token_logprobs(logits, rows, list(tokens.values()), on_device=ops.chooses_on_device)
    for (i, token), value in zip(tokens.items(), values, strict=True):
        found[i] = _Guess(token, value)
    for i in row_of.keys() - wanted.keys():
        row = logits[row_of[i]].cpu()
        try:
            found[i] = _draw(row, choosers[i], shares[i])
        except BadLogits as error:
            _note(error, row)
    return [found.get(i) for i in range(len(shares))]


def _draw(row: torch.Tensor, chooser: TokenChooser, share: Share) -> _Guess:
    """By chance, with what it was drawn from."""
    token, probs = draw_draft(chooser, row[: chooser.vocab_size], share.tokens_before)
    return _Guess(token, logprobs(row, token)[0], (probs,))


def _note(error: BadLogits, row: torch.Tensor) -> None:
    """There is no token to take; raises the error if that is the model's fault."""
    if not row.isfinite().all():
        raise error  # and not that of the sequence's settings
    log.warning("no token to propose", reason=str(error))


def _load(settings: DraftSettings) -> tuple[Runner, ProposerIdentity]:
    begin_s = time.monotonic()
    folder = resolve(settings.model)
    prepare_cpu(settings.threads or usable_cores())
    model = LlamaModel.load(
        folder, settings.dtype, settings.device, settings.kernels, settings.kv_dtype
    )
    model.set_spin(settings.spin_us)
    each = model.block_bytes(BLOCK_SIZE)
    size = PoolSize(tokens=settings.kv_tokens)
    num_blocks = size.num_blocks(each, BLOCK_SIZE, free_bytes(model.device))
    loaded_s = time.monotonic()
    graph_rows = min(settings.graph_rows, STEP_TOKENS)
    runner = Runner(model, num_blocks, BLOCK_SIZE, graph_rows=graph_rows)
    runner.warm(str(folder))
    identity = ProposerIdentity(
        proposer="model",
        max_len=min(model.config.max_model_len, num_blocks * BLOCK_SIZE),
        model=display_name(settings.model),
        weights_fingerprint=model.weights_fingerprint,
        precision=model.precision,
        token_table_hash=token_table_hash(folder),
        vocab_size=model.config.vocab_size,
    )
    give_back_memory()
    log.info(
        "model loaded",
        model=identity.model,
        kv_tokens=num_blocks * BLOCK_SIZE,
        kv_mib=round(num_blocks * each / 2**20),
        load_s=round(loaded_s - begin_s, 2),
        warm_s=round(time.monotonic() - loaded_s, 2),
    )
    return runner, identity

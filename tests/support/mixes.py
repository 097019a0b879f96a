"""Random company for a model: the target's own scheduler, pool, prefix cache and verifier.

A mix is what a batcher would do with some requests, without clocks and drafters: who is in a step,
how prompts are cut, who is preempted and what comes from the cache is the scheduler's to decide,
and the seed decides what it is given. Drafts are the right ones up to a random place.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BLOCK_SIZE, BlockPool
from outrider.engine.runner import Runner
from outrider.engine.sampling import TokenChooser
from outrider.params import AnswerParams, GenerationParams, SamplingParams, StoppingParams
from target_service.request import Request
from target_service.scheduler import Plan, Planned, Scheduler
from target_service.verifier import Verdict, Verifier
from tests.support.target_parts import make_request

MAX_REQUESTS = 6


@dataclass(frozen=True)
class PlainText:
    """A text as its model says it alone: one thread, its prompt in one step, then token by token.

    All other ways to compute it are compared with this.
    """

    sampling: SamplingParams
    token_ids: list[int]
    prompt_len: int
    logits: torch.Tensor
    """float32 [len(token_ids) - 1, vocab]; row i predicts token i + 1."""

    @staticmethod
    def run(
        runner: Runner, prompt: Sequence[int], sampling: SamplingParams, num_new: int
    ) -> PlainText:
        """Say `num_new` tokens behind the prompt."""
        torch.set_num_threads(1)
        poison(runner)
        blocks = list(range((len(prompt) + num_new) // BLOCK_SIZE + 1))
        text = list(prompt)
        chooser = chooser_of(runner, sampling, len(prompt))
        rows = [runner.forward(Batch([BatchItem(text, 0, blocks, len(text))])).clone()]
        text = [*text, chooser.choose(rows[0][-1], text)]
        while len(text) < len(prompt) + num_new:
            item = BatchItem(text[-1:], len(text) - 1, blocks, 1)
            rows.append(runner.forward(Batch([item])).clone())
            text.append(chooser.choose(rows[-1][0], text))
        return PlainText(sampling, text, len(prompt), torch.cat(rows))


def chooser_of(runner: Runner, sampling: SamplingParams, prompt_len: int) -> TokenChooser:
    """Those settings for the runner's model."""
    config = runner.model.config
    return TokenChooser(
        sampling, config.vocab_size, prompt_len=prompt_len, num_tokens=config.num_tokens
    )


def poison(runner: Runner) -> None:
    """NaN in every slot: whoever reads one that was not written shows it."""
    for tensor in runner.cache.tensors:
        # In int8 all bits set: a scale of such bytes is NaN.
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


@dataclass
class Tally:
    """What has happened in all mixes: each is something that must not change a bit."""

    rows: int = 0
    steps: int = 0
    two_threads: int = 0
    shared_steps: int = 0
    """With more than one request."""
    chunks: int = 0
    """Shares that did not reach the end of their prefix."""
    accepted: int = 0
    rejected: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    """Behind which a request began, the first time or after a preemption."""
    differences: list[str] = field(default_factory=list)

    def check(self) -> None:
        """All of it did happen, and changed nothing."""
        assert self.differences == []
        for name, count in vars(self).items():
            assert name == "differences" or count > 0, f"no {name}: {self}"


class Recorder:
    """A runner that keeps the logits of its last step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.model = runner.model
        self.logits = torch.empty(0)

    def forward(self, batch: Batch) -> torch.Tensor:
        """As the runner's."""
        self.logits = self._runner.forward(batch)
        return self.logits


class Mix:
    """Some of the texts again, together. The runner's cache is poisoned first."""

    def __init__(self, runner: Runner, texts: Sequence[PlainText], seed: int, tally: Tally) -> None:
        self._rng = rng = random.Random(seed)
        self._name = f"mix {seed}"
        self._recorder = Recorder(runner)
        self._verifier = Verifier(self._recorder)  # type: ignore[arg-type]
        self._tally = tally
        poison(runner)
        longest = max(len(text.token_ids) for text in texts) // BLOCK_SIZE + 1
        self.scheduler = Scheduler(
            BlockPool(min(runner.cache.num_blocks, longest + rng.choice([0, 0, 0, 1, 2, 40]))),
            max_sequences=rng.choice([1, 4, MAX_REQUESTS]),
            step_tokens=rng.choice([16, 33, 64, 150, 512]),
            max_waiting=MAX_REQUESTS,
            prefix_cache=rng.random() < 0.8,
            clock=lambda: float(self._num_steps),
        )
        self._num_steps = 0
        self._most_drafts = rng.choice([0, 1, 4, 8])
        self._texts: dict[Request, PlainText] = {}
        for text in rng.choices(texts, k=rng.randint(2, MAX_REQUESTS)):
            self._texts[self._request(runner, text)] = text

    def play(self) -> None:
        """All requests from their arrival to their end."""
        arriving = list(self._texts)
        while arriving or self.scheduler.has_work:
            while arriving and (not self.scheduler.has_work or self._rng.random() < 0.6):
                self.scheduler.add(arriving.pop())
            waiting = list(self.scheduler.waiting)
            plan = self.scheduler.plan(self._drafts_of)
            admitted = [request for request in waiting if request in self.scheduler.running]
            self._tally.cached_tokens += sum(each.sequence.num_computed for each in admitted)
            self._step(plan)
        self._tally.preemptions += self.scheduler.num_preemptions
        assert self.scheduler.check_integrity() == []
        assert self.scheduler.pool.num_used == 0
        for request, text in self._texts.items():
            if request.sequence.token_ids != text.token_ids:
                self._tally.differences.append(f"{self._name}: other tokens")

    def _request(self, runner: Runner, text: PlainText) -> Request:
        rng = self._rng
        num_new = len(text.token_ids) - text.prompt_len
        prompt = text.token_ids[: text.prompt_len]
        request = make_request(prompt, num_new, priority=rng.choice([0, 0, 5]))
        request.params = GenerationParams(
            text.sampling,
            StoppingParams(max_tokens=num_new, ignore_eos=True),
            answer=AnswerParams(prompt_logprobs=rng.choice([None, None, 0])),
        )
        request.chooser = chooser_of(runner, text.sampling, text.prompt_len)
        return request

    def _drafts_of(self, request: Request) -> list[int]:
        """The text's own next tokens, mostly with a wrong one among them."""
        rng, done = self._rng, request.sequence.num_tokens
        count = min(rng.randint(0, self._most_drafts), request.room_for_drafts)
        drafts = self._texts[request].token_ids[done : done + count]
        if drafts and rng.random() < 0.5:
            drafts[rng.randrange(len(drafts))] ^= 1
        return drafts

    def _step(self, plan: Plan) -> None:
        threads = self._rng.choice([1, 2])
        torch.set_num_threads(threads)
        tally = self._tally
        self._num_steps += 1
        tally.steps += 1
        tally.two_threads += threads == 2
        tally.shared_steps += len(plan.shares) > 1
        outcomes = self._verifier.run(plan)
        row = 0
        for share, item, outcome in zip(plan.shares, plan.batch.items, outcomes, strict=True):
            rows = self._recorder.logits[row : row + item.num_logits]
            row += item.num_logits
            assert outcome is None or isinstance(outcome, Verdict), outcome
            self._compare(share, item, rows, outcome)
            self._commit(share, item, outcome)

    def _compare(
        self, share: Planned, item: BatchItem, rows: torch.Tensor, verdict: Verdict | None
    ) -> None:
        """Each row whose tokens before it are the text's against the row of the plain run."""
        text = self._texts[share.request]
        # Behind a rejected draft rows are of another text.
        num_right = item.num_logits
        if verdict is not None and verdict.tokens:
            num_right -= len(share.drafts) - verdict.num_accepted
            self._tally.accepted += verdict.num_accepted
            self._tally.rejected += len(share.drafts) - verdict.num_accepted
        else:
            self._tally.chunks += 1
        first = item.end - item.num_logits
        expected = text.logits[first : first + num_right]
        self._tally.rows += num_right
        if not torch.equal(rows[:num_right], expected):
            where = f"positions {first} to {first + num_right}"
            self._tally.differences.append(f"{self._name}: {where}")

    def _commit(self, share: Planned, item: BatchItem, verdict: Verdict | None) -> None:
        """As the batcher does it."""
        request, sequence = share.request, share.request.sequence
        if verdict is not None:
            request.num_scored += len(verdict.prompt)
        if verdict is None or not verdict.tokens:
            self.scheduler.commit(request, item.end)
            return
        sequence.token_ids.extend(verdict.tokens)
        self.scheduler.commit(request, sequence.num_tokens - 1)
        if sequence.num_tokens >= request.max_len:
            self.scheduler.remove(request)

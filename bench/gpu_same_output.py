"""Texts of an engine without drafts, one by one, and with drafts, all together: equal or not.

Drafts are what followed the last two tokens where they stood before, and something wrong where they
never did, so that some stand and some fall. Choosing is EXACT_MATCH's, with each of SETTINGS.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.block_pool import BLOCK_SIZE
from outrider.engine.choosing import Rows, choose_tokens
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from outrider.engine.sampling import TokenChooser
from outrider.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
PENALISED = replace(SEEDED, repetition_penalty=1.2, presence_penalty=0.5)
SETTINGS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}
LENGTHS = (5, 18, 40, 130, 200, 33)
"""Tokens of the prompts: random ones, the second half like the first."""


@dataclass
class Text:
    """One sequence with blocks of its own."""

    token_ids: list[int]
    chooser: TokenChooser
    blocks: list[int]
    end: int
    num_computed: int = 0
    drafted: int = 0
    accepted: int = 0
    drafts: list[int] = field(default_factory=list)

    def item(self, k: int, vocab_size: int) -> BatchItem:
        """The next tokens and up to k drafts behind them."""
        count = min(k, self.end - len(self.token_ids) - 1)
        self.drafts = guess(self.token_ids, count, vocab_size)
        new = [*self.token_ids[self.num_computed :], *self.drafts]
        return BatchItem(new, self.num_computed, self.blocks, len(self.drafts) + 1)

    def commit(self, tokens: list[int]) -> None:
        """What verification made of the drafts."""
        self.drafted += len(self.drafts)
        self.accepted += len(tokens) - 1
        self.token_ids.extend(tokens)
        self.num_computed = len(self.token_ids) - 1


def guess(token_ids: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """So many drafts."""
    tail = list(token_ids[-2:])
    for begin in range(len(token_ids) - 3, -1, -1):
        if list(token_ids[begin : begin + 2]) == tail:
            found = list(token_ids[begin + 2 : begin + 2 + count])
            return found + [0] * (count - len(found))
    return [(token_ids[-1] + 1) % vocab_size] * count


def generate(runner: Runner, texts: Sequence[Text], k: int) -> None:
    """All texts to their ends, in one batch."""
    vocab_size = runner.model.config.vocab_size
    while unfinished := [text for text in texts if len(text.token_ids) < text.end]:
        items = [text.item(k, vocab_size) for text in unfinished]
        logits, ops, wanted, first = runner.forward(Batch(items)), runner.model.ops, [], 0
        for text in unfinished:
            wanted.append(Rows(logits, text.chooser, text.token_ids, text.drafts, first))
            first += 1 + len(text.drafts)
        chosen = choose_tokens(wanted, ops.choose, on_device=ops.chooses_on_device)
        for text, tokens in zip(unfinished, chosen, strict=True):
            if isinstance(tokens, Exception):
                raise tokens
            text.commit(tokens)


def make_texts(
    model: LlamaModel, lengths: Sequence[int], num_new: int, sampling: SamplingParams
) -> list[Text]:
    """Before their first token."""
    chance, texts, free = random.Random(0), [], 0
    for length in lengths:
        half = [chance.randrange(3, model.config.vocab_size) for _ in range(-(-length // 2))]
        num_blocks = -(-(length + num_new) // BLOCK_SIZE)
        chooser = TokenChooser(
            sampling,
            model.config.vocab_size,
            prompt_len=length,
            num_tokens=model.config.num_tokens,
        )
        blocks = list(range(free, free + num_blocks))
        texts.append(Text((half + half)[:length], chooser, blocks, length + num_new))
        free += num_blocks
    return texts


def check_same_output(
    model: LlamaModel, *, lengths: Sequence[int] = LENGTHS, num_new: int = 32, k: int = 4
) -> dict[str, Any]:
    """Texts that differ, and how many drafts stood, by settings."""
    report: dict[str, Any] = {}
    for name, sampling in SETTINGS.items():
        off = make_texts(model, lengths, num_new, sampling)
        runner = Runner(model, off[-1].blocks[-1] + 1)
        for text in off:
            generate(runner, [text], 0)
        on = make_texts(model, lengths, num_new, sampling)
        generate(runner, on, k)
        report[name] = {
            "texts": len(off),
            "differing": sum(a.token_ids != b.token_ids for a, b in zip(off, on, strict=True)),
            "drafted": sum(text.drafted for text in on),
            "accepted": sum(text.accepted for text in on),
        }
    return report

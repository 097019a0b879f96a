"""What every worker does with its standard input and output: a question a line, an answer a line.

    parent:  {"prompts": [[ids], ...], "num_tokens": 64}
    worker:  {"name": "openvino-genai 2026.4"}                     once, when it can be asked
             {"seconds": 0.9, "first_s": 0.1, "texts": [[ids], ...]}     for each question

Prompts of one question run at once. `seconds` is from the question to the last token; `first_s` to
the first one, null where the engine does not tell. Imports nothing, so that it runs in any
environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Answer:
    """To one question."""

    seconds: float
    first_s: float | None
    texts: list[list[int]]
    """Generated ids of each prompt."""


Ask = Callable[[list[list[int]], int], Answer]
"""Prompts and the number of tokens of each answer, greedy, whatever ends a text."""


def serve(load: Callable[[], tuple[str, Ask]]) -> None:
    """Load an engine and answer until the parent closes its end.

    Whatever a library prints goes to standard error, where it cannot be taken for an answer.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, ask = load()
    print(json.dumps({"name": name}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer = ask(question["prompts"], question["num_tokens"])
        print(json.dumps(asdict(answer)), file=answers, flush=True)

"""One stream without drafts: Outrider beside other engines, on the same prompts.

    python -m bench.single_stream --quick

Rounds of pairs, Outrider and one other in turn, each in a process that stays alive and is idle
meanwhile. Prompts have the model's chat template, answers are greedy and of one length, whatever
ends them, and the time is from the question to the last token. `outrider` is a client over gRPC of
gateway and target; `outrider-target` asks the target itself, `outrider-engine` has no service.
Its weights are kept as `--dtype auto` says, so what its file has in 4 bits stays in 4 bits, as it
does in the engines that read the file itself; `outrider-int8` rounds them to int8. Peers are
installed under out/peers at the first use. The last line is JSON: tokens a second by name, what
Outrider's are over them, and in `engines` what each is and in which precision.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.busy import Bystanders
from bench.peers import engines
from bench.peers.engines import Engines
from bench.peers.lines import Answer
from bench.peers.prompts import prompts
from bench.peers.worker import Worker
from bench.ratios import ratio_of
from outrider.models.resolve import resolve
from outrider.serving.cores import usable_cores

OURS = "outrider"
WARM_TOKENS = 16


@dataclass
class Pairs:
    """Answers of Outrider and of one other, one after the other."""

    ours: list[Answer] = field(default_factory=list)
    theirs: list[Answer] = field(default_factory=list)


def others(dtype: str, threads: int) -> dict[str, Callable[[], Worker]]:
    """Who is compared with, by name."""
    return {
        "outrider-target": lambda: engines.outrider(dtype, threads, "target"),
        "outrider-engine": lambda: engines.engine(dtype, threads),
        "outrider-int8": lambda: engines.outrider("int8", threads, "gateway"),
        "transformers": lambda: engines.transformers(threads, "one"),
        "llama.cpp": lambda: engines.llama(threads),
        "openvino": lambda: engines.openvino(threads, "one"),
    }


def measure(
    running: Engines,
    names: Sequence[str],
    texts: Sequence[Sequence[int]],
    num_tokens: int,
    rounds: int,
) -> dict[str, Pairs]:
    """Pairs by the other's name; all pairs of a round have the same prompt."""
    pairs = {name: Pairs() for name in names}
    running.ask_ours(texts[:1], WARM_TOKENS)
    for name in names:
        running.ask(name, texts[:1], WARM_TOKENS)
    for i in range(rounds):
        prompt = texts[1 + i % (len(texts) - 1)]
        for name, pair in pairs.items():
            ours = running.ask_ours([prompt], num_tokens)
            theirs = running.ask(name, [prompt], num_tokens)
            if theirs is not None:
                pair.ours.append(ours)
                pair.theirs.append(theirs)
        print_round(pairs, i)
    return pairs


def rate(answer: Answer) -> float:
    """Tokens a second, the prompt's time included."""
    return sum(map(len, answer.texts)) / answer.seconds


def later_rate(answer: Answer) -> float:
    """Tokens a second behind the first one."""
    assert answer.first_s is not None
    return (len(answer.texts[0]) - 1) / (answer.seconds - answer.first_s)


def report(pairs: Mapping[str, Pairs], running: Engines) -> dict[str, Any]:
    """What the last line says; null for who is missing."""
    answers = {OURS: [answer for pair in pairs.values() for answer in pair.ours]}
    answers |= {name: pair.theirs for name, pair in pairs.items() if name not in running.missing}
    figures = {
        "tokens_per_s": rate,
        "later_tokens_per_s": later_rate,
        "first_ms": lambda answer: 1000 * (answer.first_s or 0.0),
    }
    result: dict[str, Any] = {
        what: {
            name: round(statistics.median(map(of, answers[name])), 2) if answers.get(name) else None
            for name in (OURS, *pairs)
        }
        for what, of in figures.items()
    }
    for what, of in (("ratio", rate), ("later_ratio", later_rate)):
        result[what] = {
            name: ratio_of([*map(of, pair.ours)], [*map(of, pair.theirs)]).as_dict()
            if answers.get(name)
            else None
            for name, pair in pairs.items()
        }
    return result | {
        "missing": running.missing,
        "idle_share": running.idle_share,
        "engines": running.versions,
    }


def print_round(pairs: Mapping[str, Pairs], number: int) -> None:
    """Tokens a second of each pair."""
    shown = [
        f"{name} {rate(pair.ours[-1]):.1f}/{rate(pair.theirs[-1]):.1f}"
        for name, pair in pairs.items()
        if pair.theirs
    ]
    print(f"round {number + 1}, ours/theirs:", ", ".join(shown), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 rounds of 64 tokens")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every engine")
    parser.add_argument("--dtype", default="auto", help="of Outrider")
    options = parser.parse_args(arguments)
    rounds, num_tokens = (5, 64) if options.quick else (options.rounds, options.tokens)
    source = prompts(resolve(engines.MODEL))
    texts = [next(source) for _ in range(1 + rounds)]
    makers = others(options.dtype, options.threads)

    def ours() -> Worker:
        return engines.outrider(options.dtype, options.threads, "gateway")

    with Engines(OURS, ours) as running:
        for name, make in makers.items():
            running.start(name, make)
        bystanders = Bystanders()
        pairs = measure(running, list(makers), texts, num_tokens, rounds)
        settings: dict[str, float] = {
            "tokens": num_tokens,
            "threads": options.threads,
            "rounds": rounds,
        }
        settings |= {"other_cores": bystanders.cores}
        print(json.dumps(report(pairs, running) | settings))


if __name__ == "__main__":
    main()

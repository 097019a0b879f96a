"""Many streams at once without drafts: Outrider beside other engines that batch.

    python -m bench.throughput --quick

As bench.single_stream, with 1, 4, 16 and 32 prompts of one question: of Outrider as many clients
over gRPC, of transformers `generate_batch`, of OpenVINO GenAI its continuous batching. Prompts are
all different, and the time is from the question to the last token of the last answer. The last
line is JSON: all tokens a second by name and number of streams, what Outrider's are over the
others', and over its own of one stream.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from bench.busy import Bystanders
from bench.peers import engines
from bench.peers.engines import Engines
from bench.peers.prompts import prompts
from bench.peers.worker import Worker
from bench.ratios import ratio_of
from bench.single_stream import OURS, rate
from outrider.models.resolve import resolve
from outrider.serving.cores import usable_cores

STREAMS = (1, 4, 16, 32)


@dataclass
class Rates:
    """Tokens a second of one number of streams, a value a round."""

    ours: dict[str, list[float]] = field(default_factory=dict)
    """By the other's name, beside whose they are."""
    theirs: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, ours: float, theirs: float) -> None:
        """A pair."""
        self.ours.setdefault(name, []).append(ours)
        self.theirs.setdefault(name, []).append(theirs)


def others(threads: int) -> dict[str, Callable[[], Worker]]:
    """Who is compared with, by name."""
    return {
        "transformers": lambda: engines.transformers(threads, "many"),
        "openvino": lambda: engines.openvino(threads, "many"),
    }


@dataclass
class Bench:
    """Rounds over all numbers of streams."""

    running: Engines
    names: Sequence[str]
    texts: Sequence[Sequence[int]]
    num_tokens: int
    streams: Sequence[int] = STREAMS
    rates: dict[int, Rates] = field(default_factory=dict)
    alone: dict[int, list[float]] = field(default_factory=dict)
    """Outrider's own, the mean of a round."""

    def warm(self) -> None:
        """As much as there will ever be at once: a first question can decide on sizes."""
        texts = self.texts[: max(self.streams)]
        self.running.ask_ours(texts, self.num_tokens)
        for name in self.names:
            self.running.ask(name, texts, self.num_tokens)

    def round(self) -> None:
        """One pair with each other of each number of streams."""
        for count in self.streams:
            rates = self.rates.setdefault(count, Rates())
            texts = self.texts[:count]
            mine = [rate(self.running.ask_ours(texts, self.num_tokens))]
            for name in self.names:
                theirs = self.running.ask(name, texts, self.num_tokens)
                if theirs is not None:
                    rates.add(name, mine[-1], rate(theirs))
                    mine.append(rate(self.running.ask_ours(texts, self.num_tokens)))
            self.alone.setdefault(count, []).append(math.exp(statistics.fmean(map(math.log, mine))))
            shown = [f"{name} {each[-1]:.1f}" for name, each in rates.theirs.items()]
            print(f"{count} streams: {OURS} {self.alone[count][-1]:.1f}", *shown, flush=True)

    def report(self) -> dict[str, Any]:
        """What the last line says; null for who is missing."""
        here = [name for name in self.names if name not in self.running.missing]
        tokens: dict[str, Any] = {name: None for name in (OURS, *self.names)}
        ratio: dict[str, Any] = {name: None for name in self.names}
        tokens[OURS] = {str(n): round(statistics.median(v), 1) for n, v in self.alone.items()}
        for name in here:
            tokens[name] = {
                str(n): round(statistics.median(each.theirs[name]), 1)
                for n, each in self.rates.items()
            }
            ratio[name] = {
                str(n): ratio_of(each.ours[name], each.theirs[name]).as_dict()
                for n, each in self.rates.items()
            }
        first = self.alone[self.streams[0]]
        over_one = {str(n): ratio_of(self.alone[n], first).as_dict() for n in self.streams[1:]}
        return {
            "tokens_per_s": tokens,
            "ratio": ratio,
            "over_one_stream": over_one,
            "missing": self.running.missing,
            "idle_share": self.running.idle_share,
            "engines": self.running.versions,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 32 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every engine")
    parser.add_argument("--dtype", default="auto", help="of Outrider")
    options = parser.parse_args(arguments)
    rounds, num_tokens = (2, 32) if options.quick else (options.rounds, options.tokens)
    texts = list(islice(prompts(resolve(engines.MODEL)), max(STREAMS)))
    makers = others(options.threads)

    def ours() -> Worker:
        return engines.outrider(options.dtype, options.threads, "gateway")

    with Engines(OURS, ours) as running:
        for name, make in makers.items():
            running.start(name, make)
        bench = Bench(running, list(makers), texts, num_tokens)
        bench.warm()
        bystanders = Bystanders()
        for _ in range(rounds):
            bench.round()
        settings: dict[str, float] = {
            "tokens": num_tokens,
            "threads": options.threads,
            "rounds": rounds,
        }
        settings |= {"other_cores": bystanders.cores}
        print(json.dumps(bench.report() | settings))


if __name__ == "__main__":
    main()

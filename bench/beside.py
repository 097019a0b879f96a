"""Target and draft model beside each other on this machine's cores: which threads and waits pay.

    python -m bench.beside --choices 2+1:5,2+2:5,1+1:5 --rounds 5

A choice is the target's threads, the draft's, and how many microseconds a waiting thread of either
spins. Each is a whole stack whose drafter has the target's own model, so that every draft is right
and both are busy all the time; stacks take turns, and those whose turn it is not sleep. Every
request drafts a fixed number of tokens. Prints a line a round, tokens/s by choice, and a JSON line
with the ratios to the first choice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.ratios import ratio_of
from outrider.cli.client import Client, Question
from outrider.cli.demo import free_ports
from outrider.cli.stack import Stack
from outrider.client.answers import Finish
from outrider.client.wire import Settings
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings

PROMPT = "Tell me a story about a lighthouse and the people who live near it."
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What is compared."""

    target_threads: int
    draft_threads: int
    spin_us: int

    @classmethod
    def read(cls, text: str) -> Choice:
        """From `2+1:50`. Raises ValueError."""
        found = re.fullmatch(r"(\d+)\+(\d+):(\d+)", text)
        if found is None:
            raise ValueError(f"a choice is TARGET+DRAFT:SPIN_US, such as 2+1:50, not {text!r}")
        return cls(*map(int, found.groups()))

    def __str__(self) -> str:
        return f"{self.target_threads}+{self.draft_threads}:{self.spin_us}"


@contextlib.contextmanager
def stack(model: str, dtype: str, choice: Choice) -> Iterator[str]:
    """The three services with these threads; gives the gateway's address."""
    gateway, target, draft = free_ports(3)
    services = Stack(lambda service, line: None)
    settings = {
        "draft": DraftSettings(
            port=draft,
            metrics_port=-1,
            proposer="model",
            model=model,
            dtype=dtype,
            threads=choice.draft_threads,
            spin_us=choice.spin_us,
        ),
        "target": TargetSettings(
            port=target,
            metrics_port=-1,
            model=model,
            dtype=dtype,
            threads=choice.target_threads,
            spin_us=choice.spin_us,
            drafters=f"127.0.0.1:{draft}",
        ),
        "gateway": GatewaySettings(
            port=gateway,
            metrics_port=-1,
            http_port=-1,
            model=model,
            targets=f"127.0.0.1:{target}",
        ),
    }
    try:
        for service, each in settings.items():
            services.start(service, each)
        services.wait_healthy(settings)
        yield f"127.0.0.1:{gateway}"
    finally:
        services.stop()


def tokens_per_s(address: str, num_tokens: int, num_drafts: int) -> tuple[float, float]:
    """Of one answer behind its first token, and drafts that a round accepted on average."""
    question = Question(
        chat=(("user", PROMPT),),
        settings=Settings(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            speculation="fixed",
            max_draft_tokens=num_drafts,
        ),
    )
    began, finish, first_s = time.perf_counter(), None, 0.0
    with Client(address) as client:
        for event in client.generate(question, TIMEOUT_S):
            first_s = first_s or time.perf_counter() - began
            finish = event if isinstance(event, Finish) else finish
    assert finish is not None
    took_s = time.perf_counter() - began - first_s
    rounds = max(1, finish.rounds)
    return (finish.completion_tokens - 1) / took_s, finish.accepted / rounds


def main() -> None:
    """All choices in turn, round after round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--choices", default="2+1:5,2+2:5,1+1:5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=4)
    args = parser.parse_args()
    choices = [Choice.read(text) for text in args.choices.split(",")]
    speeds: dict[Choice, list[float]] = {choice: [] for choice in choices}
    with contextlib.ExitStack() as stacks:
        addresses = {
            choice: stacks.enter_context(stack(args.model, args.dtype, choice))
            for choice in choices
        }
        for address in addresses.values():
            tokens_per_s(address, 16, args.drafts)  # warm
        for number in range(args.rounds):
            accepted = 0.0
            # Who goes first changes, so that a drift of the machine favours nobody.
            for choice in choices if number % 2 else reversed(choices):
                speed, accepted = tokens_per_s(addresses[choice], args.tokens, args.drafts)
                speeds[choice].append(speed)
            shown = "  ".join(f"{choice} {each[-1]:.1f}" for choice, each in speeds.items())
            print(f"tokens/s  {shown}  (accepted a round {accepted:.2f})", flush=True)
    first = speeds[choices[0]]
    report = {
        str(choice): {
            "tokens_per_s": round(statistics.median(each), 2),
            **({"ratio": ratio_of(each, first).as_dict()} if choice != choices[0] else {}),
        }
        for choice, each in speeds.items()
    }
    print(json.dumps({"first": str(choices[0]), "choices": report}))


if __name__ == "__main__":
    main()

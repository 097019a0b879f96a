"""What tracing costs: streams a second with every request traced, against tracing off.

Two whole stacks stand side by side, one that sends its spans to a real collector and one that makes
none; 8 streams run on one and then on the other, in turn. Prints a line a pair and a JSON line.

    python -m bench.tracing_cost --pairs 10
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rotel

from bench.ratios import ratio_of
from outrider.cli.client import Client, Question
from outrider.cli.demo import free_ports
from outrider.cli.stack import Stack
from outrider.client.answers import Finish
from outrider.client.wire import Settings
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings

STREAMS = 8
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TOPICS = ("the sea", "a train", "bread", "stars", "a clock", "rain", "a bridge", "chess")


@contextlib.contextmanager
def collector() -> Iterator[int]:
    """A collector that takes spans and throws them away; gives its port."""
    grpc_port, http_port = free_ports(2)
    command = [
        *(str(Path(rotel.__file__).with_name("rotel-agent")), "start", "--exporter=blackhole"),
        f"--otlp-grpc-endpoint=127.0.0.1:{grpc_port}",
        f"--otlp-http-endpoint=127.0.0.1:{http_port}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield grpc_port
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def stack(model: str, endpoint: str) -> Iterator[str]:
    """The three services, traced if there is an endpoint; gives the gateway's address."""
    gateway, target, draft = free_ports(3)
    services = Stack(lambda service, line: None)
    os.environ.pop(_ENDPOINT, None)
    if endpoint:
        os.environ[_ENDPOINT] = endpoint
    try:
        services.start("draft", DraftSettings(port=draft, metrics_port=-1))
        services.start(
            "target",
            TargetSettings(
                model=model, port=target, drafters=f"127.0.0.1:{draft}", metrics_port=-1
            ),
        )
        services.start(
            "gateway",
            GatewaySettings(
                http_port=-1,
                model=model,
                port=gateway,
                targets=f"127.0.0.1:{target}",
                metrics_port=-1,
            ),
        )
        services.wait_healthy(["draft", "target", "gateway"])
        yield f"127.0.0.1:{gateway}"
    finally:
        services.stop()


def tokens_per_s(address: str, max_tokens: int) -> float:
    """Of 8 streams at once, each a text of its own."""

    def ask(topic: str) -> int:
        question = Question(
            chat=(("user", f"Tell me a story about {topic}."),),
            settings=Settings(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        )
        with Client(address) as client:
            events = list(client.generate(question, 600))
        return sum(each.completion_tokens for each in events if isinstance(each, Finish))

    started = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as threads:
        total = sum(threads.map(ask, _TOPICS))
    return total / (time.perf_counter() - started)


def main() -> None:
    """Run pairs and report their ratio with its interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    on: list[float] = []
    off: list[float] = []
    with (
        collector() as port,
        stack(args.model, "") as plain,
        stack(args.model, f"http://127.0.0.1:{port}") as traced,
    ):
        for address in (plain, traced):  # warm
            tokens_per_s(address, args.tokens)
        print("tokens/s: traced     plain   ratio")
        for pair in range(args.pairs):
            # Who goes first changes, so that a drift of the machine favours nobody.
            for address, seen in ((traced, on), (plain, off))[:: 1 if pair % 2 else -1]:
                seen.append(tokens_per_s(address, args.tokens))
            print(f"{on[-1]:16.2f}{off[-1]:10.2f}{on[-1] / off[-1]:8.3f}", flush=True)
    print(json.dumps({"streams": STREAMS, "traced_over_plain": ratio_of(on, off).as_dict()}))


if __name__ == "__main__":
    main()

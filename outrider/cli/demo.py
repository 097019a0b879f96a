"""`python -m outrider.cli.demo`: the three services, a few answers, each without and with drafts.

Leaves the token ids of both runs in out/demo/ and ends with one line of JSON. The exit status is 0
only when all ids are equal. The prompts are our own; some ask for words that stand in the prompt,
where looking up n-grams helps, and some do not.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, TextIO

import grpc
from rich.console import Console
from rich.table import Table

from outrider.cli.answer_printer import show_text
from outrider.cli.client import Client, Question
from outrider.cli.stack import Stack, StackError
from outrider.cli.terminal import adapt_streams
from outrider.client.answers import Chunk, Finish
from outrider.client.wire import Settings
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings

OUT = Path("out/demo")
ANSWER_TIMEOUT_S = 120.0
MAX_TOKENS = 64
TABLE_WIDTH = 100

PROMPTS = {
    "repeat": (
        "Repeat this list of stations exactly, one a line:\n"
        "Harbour Street, Mill Lane, Old Observatory, Northern Gardens, Ferry Crossing, "
        "Mill Lane East, Old Market, Harbour Bridge."
    ),
    "correct": (
        "Correct the spelling mistakes in this paragraph and write the whole paragraph again.\n\n"
        "The ferry leaves the habour at seven every morning. It carrys bread, letters and at times "
        "a goat to the islands. When the sea is ruff, the ferry waits behind the lighthouse until "
        "the wind drops. The captain of the ferry writes every goat into the book of the ferry."
    ),
    "extract": (
        "Copy the names out of this text, one a line.\n\n"
        "Text: Ilse Brandt keeps the bees behind the school. Tomas Varga repairs the clocks of the "
        "town hall. Ruth Adeyemi runs the bakery."
    ),
    "question": "Why do leaves change their colour in autumn?",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One run of one prompt."""

    token_ids: list[int]
    text: str
    seconds: float
    finish: Finish


def main() -> int:
    """The demo; its exit status."""
    adapt_streams()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    OUT.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as resources:
            log = resources.enter_context((OUT / "services.log").open("w", encoding="utf-8"))
            address = resources.enter_context(running_stack(log, console))
            client = resources.enter_context(Client(address))
            warm_up(client)
            runs = {name: ask_both(client, console, name) for name in PROMPTS}
    except StackError as error:
        console.print(f"[red]The services did not run:[/red] {error}")
        return 1
    except grpc.RpcError as error:
        console.print(f"[red]The gateway failed:[/red] {error.code().name}: {error.details()}")
        console.print(f"What the services said is in {OUT / 'services.log'}.")
        return 1
    save(runs)
    console.print(table_of(runs))
    summary = summary_of(runs)
    console.print(verdict(runs))
    print(json.dumps(summary), flush=True)
    return 0 if summary["same_tokens"] else 1


@contextmanager
def running_stack(log: TextIO, console: Console) -> Iterator[str]:
    """The three services on free ports; gives the gateway's address."""
    ports = free_ports(3)
    draft = DraftSettings(port=ports[2], metrics_port=-1)
    target = TargetSettings(port=ports[1], drafters=f"127.0.0.1:{ports[2]}", metrics_port=-1)
    gateway = GatewaySettings(
        port=ports[0], http_port=-1, targets=f"127.0.0.1:{ports[1]}", metrics_port=-1
    )
    stack = Stack(lambda service, line: print(service, line, file=log, flush=True))
    signal.signal(signal.SIGTERM, _interrupt)
    with console.status("Starting gateway, target and draft ..."):
        for service, settings in (("draft", draft), ("target", target), ("gateway", gateway)):
            stack.start(service, settings)
        try:
            stack.wait_healthy(["draft", "target", "gateway"])
        except BaseException:
            stack.kill()
            raise
    try:
        yield f"127.0.0.1:{ports[0]}"
    finally:
        stack.stop()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in bound]


def question(
    prompt: str, speculation: Literal["auto", "off"], max_tokens: int = MAX_TOKENS
) -> Question:
    """A greedy chat turn."""
    settings = Settings(temperature=0.0, max_tokens=max_tokens, speculation=speculation)
    return Question(chat=(("user", prompt),), settings=settings)


def warm_up(client: Client) -> None:
    """The first request pays for what is made once; it belongs to neither side."""
    for what in (question("Count to three.", "off", 8), question("Count to three.", "auto", 8)):
        for _ in client.generate(what, ANSWER_TIMEOUT_S):
            pass


def ask_both(client: Client, console: Console, name: str) -> tuple[Answer, Answer]:
    """(without drafts, with drafts), streamed as they come."""
    console.print(f"\n[bold]{name}[/bold]  [dim]{PROMPTS[name].splitlines()[0]}[/dim]")
    console.print("[dim]without drafts:[/dim]")
    off = ask(client, console, question(PROMPTS[name], "off"))
    console.print("[dim]with drafts (green: text of accepted draft tokens):[/dim]")
    on = ask(client, console, question(PROMPTS[name], "auto"))
    return off, on


def ask(client: Client, console: Console, what: Question) -> Answer:
    """One answer, printed while it comes."""
    token_ids: list[int] = []
    texts: list[str] = []
    finish = None
    began = time.perf_counter()
    for event in client.generate(what, ANSWER_TIMEOUT_S):
        if isinstance(event, Chunk):
            token_ids += [token.id for token in event.tokens]
            texts.append(event.text)
            show_text(console, event)
        else:
            finish = event
    seconds = time.perf_counter() - began
    console.print()
    if finish is None:
        raise StackError("an answer ended without a finish")
    return Answer(token_ids, "".join(texts), seconds, finish)


def rate(answers: list[Answer]) -> float:
    """Tokens per second over whole requests, prompt included."""
    return sum(len(a.token_ids) for a in answers) / sum(a.seconds for a in answers)


def table_of(runs: dict[str, tuple[Answer, Answer]]) -> Table:
    """OFF against ON, one row a prompt."""
    table = Table(title="Without drafts (OFF) and with drafts (ON)", title_justify="left")
    for heading in ("prompt", "tokens", "OFF tok/s", "ON tok/s", "faster"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for heading in ("rounds", "drafted", "accepted", "ids equal"):
        table.add_column(heading, justify="right")
    for name, (off, on) in runs.items():
        table.add_row(
            name,
            str(len(on.token_ids)),
            f"{rate([off]):.1f}",
            f"{rate([on]):.1f}",
            f"{rate([on]) / rate([off]):.2f} x",
            str(on.finish.rounds),
            str(on.finish.drafted),
            str(on.finish.accepted),
            "yes" if off.token_ids == on.token_ids else "NO",
        )
    return table


def summary_of(runs: dict[str, tuple[Answer, Answer]]) -> dict[str, bool | int | float]:
    """The last line."""
    offs = [off for off, _ in runs.values()]
    ons = [on for _, on in runs.values()]
    return {
        "prompts": len(runs),
        "same_tokens": all(off.token_ids == on.token_ids for off, on in runs.values()),
        "tokens_per_s_off": round(rate(offs), 2),
        "tokens_per_s_on": round(rate(ons), 2),
        "drafted": sum(on.finish.drafted for on in ons),
        "accepted": sum(on.finish.accepted for on in ons),
    }


def verdict(runs: dict[str, tuple[Answer, Answer]]) -> str:
    """One sentence for people."""
    summary = summary_of(runs)
    if not summary["same_tokens"]:
        return f"[red]The tokens differ.[/red] Both runs are in {OUT}/."
    if not summary["drafted"]:
        return f"[yellow]The same tokens, but no draft was used:[/yellow] see {OUT}/services.log."
    # An average would say more of the choice of prompts than of drafts.
    speeds = {name: rate([on]) / rate([off]) for name, (off, on) in runs.items()}
    low, high = min(speeds, key=speeds.__getitem__), max(speeds, key=speeds.__getitem__)
    return (
        f"The same tokens; from {speeds[low]:.2f} ({low}) to {speeds[high]:.2f} ({high}) times the "
        f"speed. Both runs are in {OUT}/."
    )


def save(runs: dict[str, tuple[Answer, Answer]]) -> None:
    """off.json and on.json: per prompt the text, the ids and how it ended."""
    for side, name in enumerate(("off", "on")):
        content = {
            prompt: {
                "prompt": PROMPTS[prompt],
                "token_ids": answers[side].token_ids,
                "text": answers[side].text,
                "seconds": answers[side].seconds,
                "finish": dataclasses.asdict(answers[side].finish),
            }
            for prompt, answers in runs.items()
        }
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (OUT / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

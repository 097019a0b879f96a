"""`outrider chat`: a conversation with a gateway on a terminal, or line by line from a pipe.

Ctrl-C stops the answer, Ctrl-D leaves. Exit status: that of `outrider generate`; on a terminal a
failed answer is told and the conversation goes on.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import click
import grpc
from rich.console import Console

from outrider.cli.answer_printer import show_text
from outrider.cli.chat_session import ChatSession, CommandError, Quit, parse_drafts
from outrider.cli.client import Client
from outrider.cli.exits import EXIT_HELP, INTERRUPTED, USAGE, report
from outrider.cli.gateway_options import gateway_options
from outrider.cli.values import SECONDS, TEXT
from outrider.client.answers import Chunk, Finish
from outrider.serving.tls import ClientTls
from outrider.text import counted, is_text

PROMPT = "> "


def _drafts(_: click.Context, __: click.Parameter, text: str) -> Any:
    try:
        return parse_drafts(text)
    except CommandError as error:
        raise click.BadParameter(str(error)) from error


@click.command(epilog=EXIT_HELP)
@gateway_options
@click.option(
    "--model", type=TEXT, default="", help="A model's name. Empty: the gateway's only one."
)
@click.option("--system", type=TEXT, default=None, help="The turn before all others.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=None, help="Unset: a new one.")
@click.option(
    "--drafts",
    "speculation",
    default="on",
    show_default=True,
    callback=_drafts,
    metavar="on|off|K",
    help="Let the target decide, none, or K tokens each round.",
)
@click.option("--max-tokens", type=click.IntRange(1, 2**32 - 1), default=512, show_default=True)
@click.option("--timeout", "timeout_s", type=SECONDS, default=600.0, show_default=True)
def chat(
    address: str, api_key: str | None, tls: ClientTls | None, timeout_s: float, **settings: Any
) -> None:
    """Talk with the model. /help lists what else can be typed.

    The text of drafted tokens is green. Ctrl-C stops an answer, Ctrl-D leaves. Without a
    terminal each line of standard input is a turn, and the first failed answer ends the program.
    """
    session = ChatSession(**settings)
    with Client(address, api_key=api_key, tls=tls) as client:
        status = Conversation(session, client, address, timeout_s).run()
    raise click.exceptions.Exit(status)


class Conversation:
    """Reads lines, shows answers."""

    def __init__(
        self, session: ChatSession, client: Client, address: str, timeout_s: float
    ) -> None:
        self._session = session
        self._client = client
        self._address = address
        self._timeout_s = timeout_s
        self._terminal = sys.stdin.isatty()
        self._out = Console(highlight=False, soft_wrap=True)
        self._reading = False
        self._answering = False
        self._stopped = False

    def run(self) -> int:
        """Until the user leaves; the exit status."""
        if self._terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() editing and the lines before

            click.echo("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves", err=True)
        with self._interrupts():
            try:
                for line in self._lines():
                    status = self._turn(line)
                    if status and not self._terminal:
                        return status
            except Quit:
                pass
            except KeyboardInterrupt:
                return INTERRUPTED
        return 0

    def _lines(self) -> Iterator[str]:
        """What the user types; ends at Ctrl-D."""
        while True:
            try:
                self._reading = True
                line = input(PROMPT if self._terminal else "")
            except EOFError:
                if self._terminal:
                    click.echo()
                return
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                click.echo()  # the line is dropped, as in a shell
                continue
            finally:
                self._reading = False
            if line.strip():
                yield line.strip()

    def _turn(self, line: str) -> int:
        """A command or an answer; the exit status that it would have alone."""
        if not is_text(line):
            click.echo("Error: the line must be text in UTF-8", err=True)
            return USAGE
        if line.startswith("/") and not line.startswith("//"):
            try:
                click.echo(self._session.command(line), err=True)
            except CommandError as error:
                click.echo(f"Error: {error}", err=True)
                return USAGE
            return 0
        text = line.removeprefix("/") if line.startswith("//") else line
        texts: list[str] = []
        status = 0
        began = time.monotonic()
        try:
            self._stopped, self._answering = False, True
            self._show(self._session.question(text), texts)
        except grpc.RpcError as error:
            self._out.print()
            if self._stopped and error.code() is grpc.StatusCode.CANCELLED:
                click.echo("[stopped]", err=True)
            else:
                waited_s = time.monotonic() - began
                status = report(error, self._address, self._timeout_s, waited_s, self._client.tls)
        finally:
            self._answering = False
        self._session.answered(text, "".join(texts))
        return status

    def _show(self, question: Any, texts: list[str]) -> None:
        """Print an answer while it comes, and its closing line; `texts` gets the pieces."""
        began = time.perf_counter()
        first_s = 0.0
        for event in self._client.generate(question, self._timeout_s):
            if self._stopped:  # perhaps before there was a call to cancel
                self._client.cancel()
            if isinstance(event, Chunk):
                first_s = first_s or time.perf_counter() - began
                texts.append(event.text)
                show_text(self._out, event)
                continue
            seconds = time.perf_counter() - began
            self._session.totals.add(event, seconds)
            self._out.print()
            click.echo(click.style(closing_line(event, seconds, first_s), dim=True), err=True)

    @contextlib.contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C cancels a running answer, drops the line that is being typed, and does nothing in
        between, wherever the program is then."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            if self._answering:
                self._stopped = True
                # On a thread: the call's own locks may be held by the code under this handler.
                threading.Thread(target=self._client.cancel).start()
            elif self._reading:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def closing_line(finish: Finish, seconds: float, first_s: float) -> str:
    """What one answer took and what drafts did for it."""
    rate = finish.completion_tokens / seconds if seconds else 0.0
    return (
        f"[{finish.reason}; {counted(finish.completion_tokens, 'token')}, {rate:.1f} tokens/s, "
        f"first after {first_s:.2f} s; {finish.accepted} of {finish.drafted} drafted tokens "
        f"accepted in {counted(finish.rounds, 'round')}; seed {finish.seed}]"
    )

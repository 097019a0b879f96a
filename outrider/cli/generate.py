"""`outrider generate`: ask a gateway and stream the answer. Exit statuses: see `exits.py`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any, cast

import click
import grpc

from outrider.cli.answer_printer import AnswerPrinter
from outrider.cli.client import Client, Question
from outrider.cli.exits import EXIT_HELP, INTERRUPTED, report
from outrider.cli.gateway_options import gateway_options
from outrider.cli.values import SECONDS, TEXT
from outrider.client.answers import Chunk, Finish
from outrider.client.wire import Settings
from outrider.params import SpeculationMode, VerificationMode
from outrider.serving.tls import ClientTls
from outrider.text import is_text


def _names(enum: type[Any]) -> click.Choice[str]:
    return click.Choice([member.value.replace("_", "-") for member in enum])


@click.command(epilog=EXIT_HELP)
@click.argument("prompt", type=TEXT)
@click.option("--chat", is_flag=True, help="PROMPT is a user's turn; the model's template applies.")
@click.option(
    "--system", type=TEXT, default=None, help="The system turn of a chat; implies --chat."
)
@gateway_options
@click.option(
    "--model", type=TEXT, default="", help="A model's name. Empty: the gateway's only one."
)
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--min-tokens", type=int, default=0, show_default=True)
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0: the best token."
)
@click.option("--top-k", type=int, default=0, help="Keep the k best tokens; 0 keeps all.")
@click.option("--top-p", type=float, default=1.0, help="Keep the smallest set this likely.")
@click.option("--min-p", type=float, default=0.0, help="Keep tokens this likely, as a share.")
@click.option("--seed", type=int, default=None, help="Unset: the gateway draws one and says it.")
@click.option("--repetition-penalty", type=float, default=1.0)
@click.option("--frequency-penalty", type=float, default=0.0)
@click.option("--presence-penalty", type=float, default=0.0)
@click.option(
    "--stop", type=TEXT, multiple=True, help="A string that ends the text. Several are allowed."
)
@click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True)
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end of text.")
@click.option("--speculation", type=_names(SpeculationMode), default="auto", show_default=True)
@click.option("--max-draft-tokens", type=int, default=None, help="A cap; with fixed, the number.")
@click.option(
    "--verification", type=_names(VerificationMode), default="exact-match", show_default=True
)
@click.option("--n", type=int, default=None, help="Several choices, each with a seed of its own.")
@click.option(
    "--logprobs",
    type=int,
    default=None,
    help="Show each token's log-probability and this many likely ones at its place.",
)
@click.option("--prompt-logprobs", type=int, default=None, help="The same of the prompt's tokens.")
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=600.0, show_default=True, help="Seconds."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def generate(
    prompt: str,
    timeout_s: float,
    address: str,
    api_key: str | None,
    tls: ClientTls | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Send PROMPT ("-": read it from standard input) and print the answer as it comes.

    On a terminal, the text of drafted tokens is green. Log-probabilities and a line about the
    drafts follow on standard error.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not is_text(text):
        raise click.UsageError("PROMPT must be text in UTF-8")
    question = _question(text, given)
    with Client(address, api_key=api_key, tls=tls) as client:
        printer = AnswerPrinter(given["n"] or 1, client.text_of)
        began = time.monotonic()
        try:
            for event in client.generate(question, timeout_s):
                (_show_json if as_json else printer)(event)
        except grpc.RpcError as error:
            printer.end_line()
            status = report(error, address, timeout_s, time.monotonic() - began, tls)
            raise click.exceptions.Exit(status) from error
        except KeyboardInterrupt as interrupt:
            printer.end_line()
            raise click.exceptions.Exit(INTERRUPTED) from interrupt


def _question(prompt: str, given: dict[str, Any]) -> Question:
    _check_integers(given)
    chat: tuple[tuple[str, str], ...] = ()
    if given["chat"] or given["system"] is not None:
        system = [("system", given["system"])] if given["system"] is not None else []
        chat = (*system, ("user", prompt))
    settings = {name: given[name] for name in Settings.__annotations__ if name in given}
    settings["verification"] = given["verification"].replace("-", "_")
    return Question(text=prompt, chat=chat, settings=cast(Settings, settings))


def _check_integers(given: dict[str, Any]) -> None:
    """What the wire cannot even carry; every other limit is the gateway's to tell."""
    small = ("max_tokens", "min_tokens", "top_k", "max_draft_tokens", "n")
    limits = {"seed": 2**64 - 1} | dict.fromkeys((*small, "logprobs", "prompt_logprobs"), 2**32 - 1)
    values = [(name, given[name], high) for name, high in limits.items()]
    values += [("stop_token_id", each, 2**32 - 1) for each in given["stop_token_ids"]]
    for name, value, high in values:
        if value is not None and not 0 <= value <= high:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} must be between 0 and {high}, got {value}")


def _show_json(event: Chunk | Finish) -> None:
    fields = dataclasses.asdict(event, dict_factory=_what_was_asked_for)
    if isinstance(event, Finish):
        fields = {"type": "finish", **fields, "proposed": event.proposed}
    else:
        fields = {"type": "chunk", **fields}
    click.echo(json.dumps(fields, ensure_ascii=False))


def _what_was_asked_for(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Without log-probabilities where there are none."""
    empty = {"logprob": None, "top": (), "prompt_tokens": (), "finish": None}
    return {key: value for key, value in fields if key not in empty or value != empty[key]}

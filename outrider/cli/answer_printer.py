"""An answer for people: text to standard output, everything else to standard error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import click
from rich.console import Console
from rich.text import Text

from outrider.client.answers import Chunk, Finish, PromptToken, Token
from outrider.text import counted, for_terminal

DRAFTED_STYLE = "green"


def show_text(out: Console, chunk: Chunk) -> None:
    """Its text, behind what is on the line: coloured and harmless on a terminal, elsewhere as it
    is."""
    if out.is_terminal:
        text = for_terminal(chunk.text)
        out.print(Text(text, style=DRAFTED_STYLE if chunk.drafted else ""), end="")
    else:
        out.file.write(chunk.text)
        out.file.flush()


class AnswerPrinter:
    """Prints the events of one request.

    A single choice comes as it is made. Several are made side by side, so each is shown as a whole
    once it has ended. `text_of` tells what a token reads like, and is asked for log-probabilities.
    """

    def __init__(self, num_choices: int, text_of: Callable[[int], str]) -> None:
        self._num_choices = num_choices
        self._text_of = text_of
        self._texts: dict[int, str] = {}
        self._out = Console(highlight=False, soft_wrap=True)
        self._chunks: defaultdict[int, list[Chunk]] = defaultdict(list)
        self._in_line = False

    def __call__(self, event: Chunk | Finish) -> None:
        """Show what there is to be shown now."""
        if isinstance(event, Chunk):
            self._chunks[event.index].append(event)
            if self._num_choices == 1:
                self._show_text(event)
            return
        chunks = self._chunks.pop(event.index, [])
        if self._num_choices > 1:
            self._out.print(f"[choice {event.index}]", markup=False)
            for chunk in chunks:
                self._show_text(chunk)
        self._in_line = True  # also where it is empty
        self.end_line()
        self._show_scores("prompt", [token for each in chunks for token in each.prompt_tokens])
        self._show_scores("answer", [token for each in chunks for token in each.tokens])
        choice = f"choice {event.index}; " if self._num_choices > 1 else ""
        click.echo(
            f"[{choice}{event.reason}; {counted(event.completion_tokens, 'token')}; "
            f"seed {event.seed}; {event.accepted} of {event.drafted} drafted tokens accepted "
            f"in {counted(event.rounds, 'round')}]",
            err=True,
        )

    def end_line(self) -> None:
        """Nothing more comes of the answer: what else there is to say begins a line."""
        if self._in_line:
            self._out.print()
            self._in_line = False

    def _show_text(self, chunk: Chunk) -> None:
        if chunk.text:
            self._in_line = not chunk.text.endswith("\n")
        show_text(self._out, chunk)

    def _show_scores(self, heading: str, tokens: Sequence[Token | PromptToken]) -> None:
        """One line a token, with the likeliest ones at its place; nothing where none was asked."""
        if all(token.logprob is None for token in tokens):
            return
        click.echo(f"{heading:>8}   logprob  token", err=True)
        for token in tokens:
            value = "-" if token.logprob is None else f"{token.logprob:.4f}"
            line = f"{token.id:>8} {value:>9}  {self._shown(token.id):<16}"
            line += "".join(f"  {self._shown(each)} {logprob:.4f}" for each, logprob in token.top)
            click.echo(line.rstrip(), err=True)

    def _shown(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = repr(self._text_of(token_id))
        return self._texts[token_id]

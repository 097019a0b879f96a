"""A conversation as `outrider chat` keeps it: turns, settings, totals, and the /commands.

Knows neither the terminal nor the network: text in, questions and replies out.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from outrider.cli.client import Question
from outrider.client.answers import Finish
from outrider.client.wire import Settings
from outrider.params import SpeculationMode, SpeculationParams
from outrider.text import counted


class Quit(Exception):
    """The user wants to leave."""


class CommandError(ValueError):
    """A command that cannot be done; the message says why."""


@dataclass
class Totals:
    """Sums over all answers."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    unused: dict[str, int] = field(default_factory=dict)

    def add(self, finish: Finish, seconds: float) -> None:
        """One more answer that came to its end."""
        self.answers += 1
        self.tokens += finish.completion_tokens
        self.seconds += seconds
        self.rounds += finish.rounds
        self.drafted += finish.drafted
        self.accepted += finish.accepted
        for reason, count in finish.unused.items():
            self.unused[reason] = self.unused.get(reason, 0) + count

    def __str__(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        share = f" ({self.accepted / self.drafted:.0%})" if self.drafted else ""
        proposed = self.drafted + sum(self.unused.values())
        unused = ", ".join(f"{reason} {count}" for reason, count in sorted(self.unused.items()))
        return (
            f"{counted(self.answers, 'answer')}, {counted(self.tokens, 'token')}, "
            f"{rate:.1f} tokens/s\n"
            f"{self.accepted} of {self.drafted} drafted tokens accepted{share} "
            f"in {counted(self.rounds, 'round')}; of {proposed} proposed unused: {unused or 'none'}"
        )


def parse_drafts(text: str) -> SpeculationParams:
    """on, off, or a number of tokens to draft each round."""
    if text == "on":
        return SpeculationParams(mode=SpeculationMode.AUTO)
    if text == "off":
        return SpeculationParams(mode=SpeculationMode.OFF)
    if _is_number(text, 2**32):
        return SpeculationParams(mode=SpeculationMode.FIXED, max_draft_tokens=int(text))
    raise CommandError(f"drafts are on, off or a number of tokens, not {text!r}")


def _is_number(text: str, below: int) -> bool:
    """A whole one. Of thousands of digits Python makes no number at all."""
    return text.isdecimal() and len(text) <= len(str(below)) and int(text) < below


@dataclass
class ChatSession:
    """One conversation. Lines that begin with a slash are commands."""

    system: str | None = None
    temperature: float = 0.0
    seed: int | None = None
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    max_tokens: int = 512
    model: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def question(self, text: str) -> Question:
        """The conversation so far and one more turn of the user."""
        system = [("system", self.system)] if self.system is not None else []
        settings = Settings(
            model=self.model,
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            speculation=self.speculation.mode.value,
            max_draft_tokens=self.speculation.max_draft_tokens,
        )
        return Question(chat=(*system, *self.turns, ("user", text)), settings=settings)

    def answered(self, text: str, answer: str) -> None:
        """Remember a turn and what came back, be it cut; nothing at all leaves no trace."""
        if answer:
            self.turns += [("user", text), ("assistant", answer)]

    def command(self, line: str) -> str:
        """Do what a line such as `/seed 7` says; the reply. Raises Quit and CommandError."""
        name, _, argument = line.removeprefix("/").partition(" ")
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists all"
            raise CommandError(f"there is no /{name}; {hint}")
        return COMMANDS[name][2](self, argument.strip())

    def _help(self, _: str) -> str:
        rows = [(f"/{name} {usage}".rstrip(), text) for name, (usage, text, _) in COMMANDS.items()]
        rows += [
            ("//...", "say a line that begins with a slash"),
            ("Ctrl-C", "stop the answer"),
            ("Ctrl-D", "leave"),
        ]
        width = max(len(left) for left, _ in rows)
        return "\n".join(f"{left:<{width}}  {text}" for left, text in rows)

    def _reset(self, _: str) -> str:
        self.turns.clear()
        return "a new conversation"

    def _system(self, text: str) -> str:
        if text:
            self.system = None if text == "off" else text
        return f"system: {self.system}" if self.system is not None else "no system turn"

    def _seed(self, text: str) -> str:
        if text == "off":
            self.seed = None
        elif text:
            if not _is_number(text, 2**64):
                raise CommandError(f"a seed is a number from 0 to {2**64 - 1}, or off")
            self.seed = int(text)
        return "a new seed each time" if self.seed is None else f"seed {self.seed}"

    def _temperature(self, text: str) -> str:
        if text:
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if not 0 <= value <= 100:
                raise CommandError("a temperature is a number from 0 to 100")
            self.temperature = value
        return f"temperature {self.temperature:g}"

    def _drafts(self, text: str) -> str:
        if text:
            self.speculation = parse_drafts(text)
        if self.speculation.mode is SpeculationMode.FIXED:
            return f"drafts: {self.speculation.max_draft_tokens} each round"
        return f"drafts {'on' if self.speculation.mode is SpeculationMode.AUTO else 'off'}"

    def _stats(self, _: str) -> str:
        return str(self.totals)

    def _save(self, text: str) -> str:
        if not text:
            raise CommandError("name a file: /save FILE")
        content = {
            "system": self.system,
            "messages": [{"role": role, "content": content} for role, content in self.turns],
            "temperature": self.temperature,
            "seed": self.seed,
            "totals": dataclasses.asdict(self.totals),
        }
        data = (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
        try:
            path = Path(text).expanduser()
            _write_new(path, data)
        except OSError as error:
            raise CommandError(f"cannot save to {text}: {error.strerror}") from error
        except (ValueError, RuntimeError) as error:  # a name that none can have; ~nobody
            raise CommandError(f"cannot save to {text}: {error}") from error
        return f"saved to {path}"

    def _quit(self, _: str) -> str:
        raise Quit


def _write_new(path: Path, data: bytes) -> None:
    """All of it, or no file. Raises OSError, also where there is one already."""
    file = path.open("xb")
    try:
        with file:
            file.write(data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


# Name: (usage, help, what it does).
COMMANDS: dict[str, tuple[str, str, Callable[[ChatSession, str], str]]] = {
    "help": ("", "show this", ChatSession._help),
    "reset": ("", "forget the conversation, keep the settings", ChatSession._reset),
    "system": ("TEXT|off", "the turn before all others", ChatSession._system),
    "seed": ("N|off", "the same seed for every answer, or a new one", ChatSession._seed),
    "temperature": ("X", "0 takes the best token", ChatSession._temperature),
    "drafts": ("on|off|K", "let the target decide, none, or K each round", ChatSession._drafts),
    "stats": ("", "tokens and drafts of all answers so far", ChatSession._stats),
    "save": ("FILE", "the conversation as JSON, into a new file", ChatSession._save),
    "quit": ("", "leave", ChatSession._quit),
}

"""What a gateway answers, as plain values: pieces of text while they come, and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    id: int
    drafted: bool
    """It was proposed by the drafter and accepted."""
    logprob: float | None = None
    """Natural logarithm of its probability, when `logprobs` was asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the likeliest tokens at this place, best first."""


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt; the first has no log-probability."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice."""

    index: int
    reason: str
    """"stop" or "length"."""
    prompt_tokens: int
    """0 for every choice but the first, which shares its prompt with them."""
    completion_tokens: int
    seed: int
    """The seed that gives this text again."""
    rounds: int
    """Verifications that had at least one draft token."""
    drafted: int
    """Draft tokens that a step verified."""
    accepted: int
    """Draft tokens that stood."""
    accepted_per_position: tuple[int, ...] = ()
    """Rounds that accepted at least i + 1 drafts."""
    unused: dict[str, int] = field(default_factory=dict)
    """Proposed tokens that no step verified, by reason."""
    plain_steps: int = 0
    """Steps without a draft."""
    cached_prompt_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""

    @property
    def proposed(self) -> int:
        """What drafters sent: each token was drafted or not used."""
        return self.drafted + sum(self.unused.values())


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one choice."""

    index: int
    text: str
    """To append: never half a character, never taken back; may be empty."""
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[PromptToken, ...] = ()
    """The prompt's next ones, when `prompt_logprobs` was asked for."""
    finish: Finish | None = None
    """Set in the last chunk of a choice, which has no text."""

    @property
    def drafted(self) -> bool:
        """The text is that of accepted drafts: a gateway puts tokens of one origin in a chunk."""
        return bool(self.tokens) and all(token.drafted for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole text."""

    text: str
    tokens: tuple[Token, ...]
    finish: Finish

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of its tokens, a stop token among them."""
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of one request."""

    choices: tuple[Choice, ...]
    """As many as `n`; choice 0 has the request's seed."""
    prompt_tokens: tuple[PromptToken, ...] = ()
    """When `prompt_logprobs` was asked for."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as the model sees it."""

    ids: tuple[int, ...]
    spelled: tuple[str, ...]
    """Each id's token as the vocabulary spells it."""
    max_model_len: int
    """The longest sequence the model takes, prompt and answer together."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for."""

    name: str
    max_model_len: int
    vocab_size: int
    ready: bool
    """At least one target is ready to serve it."""


def collect(chunks: Sequence[Chunk]) -> Answer:
    """The answer of all its chunks, in the order in which they came."""
    finishes = sorted((each.finish for each in chunks if each.finish), key=lambda end: end.index)
    choices = []
    for finish in finishes:
        own = [chunk for chunk in chunks if chunk.index == finish.index]
        tokens = tuple(token for chunk in own for token in chunk.tokens)
        choices.append(Choice("".join(chunk.text for chunk in own), tokens, finish))
    return Answer(tuple(choices), tuple(each for chunk in chunks for each in chunk.prompt_tokens))

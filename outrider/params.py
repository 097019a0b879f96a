"""What a caller may ask of a text: how tokens are chosen, when they end, how drafts are used.

Plain values with their limits in one place. Knows nothing of torch, gRPC or protobuf, so that the
gateway, the target, the draft and the engine can all hold the same objects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

MAX_SEED = 2**64 - 1
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 512
MAX_STOP_TOKEN_IDS = 64
MAX_REQUEST_ID_BYTES = 128
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_PRIORITY = 100
_LEAST_PENALTY = 9.999999974752427e-07
"""1e-6 as it travels: in float32 it is a little less."""


class InvalidParam(ValueError):
    """A value outside its limits. `field` is its name on the wire, `message` the limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def check_range(
    field: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    """Raise InvalidParam unless low <= value <= high (low < value if `low_open`); not for NaN."""
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside:  # also catches NaN
        bound = "above" if low_open else "at least"
        limit = f"{bound} {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
        raise InvalidParam(field, f"must be {limit}, got {value:g}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen: first penalties and bias, then temperature and the filters."""

    temperature: float = 1.0
    """0 picks the best token."""
    top_k: int = 0
    """Keep the k best; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set that reaches this probability."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the best one's probability."""
    seed: int = 0
    """0 to 2**64 - 1."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added value), sorted by id."""

    @property
    def greedy(self) -> bool:
        """The best token is taken; no noise is needed."""
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidParam for the first value outside its limits."""
        check_range("sampling.temperature", self.temperature, 0, 100)
        check_range("sampling.top_k", self.top_k, 0, 2**31 - 1)
        check_range("sampling.top_p", self.top_p, 0, 1, low_open=True)
        check_range("sampling.min_p", self.min_p, 0, 1)
        check_range("sampling.seed", self.seed, 0, MAX_SEED)
        # Beyond these a logit times or over it is no longer finite.
        check_range("sampling.repetition_penalty", self.repetition_penalty, _LEAST_PENALTY, 1e6)
        check_range("sampling.frequency_penalty", self.frequency_penalty, -2, 2)
        check_range("sampling.presence_penalty", self.presence_penalty, -2, 2)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParam(
                "sampling.logit_bias",
                f"at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}",
            )
        for token_id, value in self.logit_bias:
            check_token_id("sampling.logit_bias", token_id, vocab_size)
            check_range(f"sampling.logit_bias[{token_id}]", value, -100, 100)


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When generation ends."""

    max_tokens: int | None = None
    """None: up to the context's end."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many generated tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the gateway's work."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidParam for the first value outside its limits."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidParam("stopping.max_tokens", f"must be at least 1, got {self.max_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParam(
                "stopping.min_tokens",
                f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParam(
                "stopping.stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}"
            )
        for stop in self.stop:
            if not stop:
                raise InvalidParam("stopping.stop", "a stop string must not be empty")
            if len(stop) > MAX_STOP_STRING_CHARS:
                raise InvalidParam(
                    "stopping.stop",
                    f"a stop string has at most {MAX_STOP_STRING_CHARS} characters, "
                    f"got {len(stop)}",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParam(
                "stopping.stop_token_ids",
                f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
            )
        check_token_ids("stopping.stop_token_ids", self.stop_token_ids, vocab_size)


class SpeculationMode(Enum):
    """Who decides how many tokens are drafted."""

    AUTO = "auto"
    OFF = "off"
    FIXED = "fixed"


class VerificationMode(Enum):
    """How drafts are checked."""

    EXACT_MATCH = "exact_match"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How drafts may be used."""

    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None
    """AUTO: a cap. FIXED: exactly this many. None: the target's limit."""
    verification: VerificationMode = VerificationMode.EXACT_MATCH

    def validate(self, max_draft_tokens: int) -> None:
        """Raise InvalidParam for the first value outside its limits."""
        if self.max_draft_tokens is not None and self.max_draft_tokens > max_draft_tokens:
            raise InvalidParam(
                "speculation.max_draft_tokens",
                f"must be at most {max_draft_tokens}, got {self.max_draft_tokens}",
            )


def check_token_id(field: str, token_id: int, vocab_size: int) -> None:
    """Raise InvalidParam unless 0 <= token_id < vocab_size."""
    if not 0 <= token_id < vocab_size:
        raise InvalidParam(
            field, f"token id must be at least 0 and below {vocab_size}, got {token_id}"
        )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidParam, with its index, for the first that is none. Quick where all are good."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        for index, token_id in enumerate(token_ids):
            check_token_id(f"{field}[{index}]", token_id, vocab_size)


def check_request_id(request_id: str) -> None:
    """Raise InvalidParam for one that is too long."""
    num_bytes = len(request_id.encode())
    if num_bytes > MAX_REQUEST_ID_BYTES:
        raise InvalidParam("request_id", f"at most {MAX_REQUEST_ID_BYTES} bytes, got {num_bytes}")


@dataclass(frozen=True, slots=True)
class AnswerParams:
    """What comes back beside the tokens of one text."""

    logprobs: int | None = None
    """Log-probability of each token and of this many alternatives; None: none."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    n: int = 1
    """Texts behind the same prompt, each with a seed of its own."""

    def validate(self) -> None:
        """Raise InvalidParam for the first value outside its limits."""
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                check_range(name, value, 0, MAX_LOGPROBS)
        check_range("n", self.n, 1, MAX_CHOICES)


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """All of them, as one request holds them."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    answer: AnswerParams = field(default_factory=AnswerParams)

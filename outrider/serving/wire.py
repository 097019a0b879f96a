"""Protobuf to `outrider.params` and back: the settings that every service passes on."""

from __future__ import annotations

from typing import Protocol

from outrider.params import (
    AnswerParams,
    InvalidParam,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    VerificationMode,
)
from protos.outrider.v1 import sampling_pb2 as pb

_MODES = {
    pb.SpeculationParams.MODE_UNSPECIFIED: SpeculationMode.AUTO,
    pb.SpeculationParams.MODE_AUTO: SpeculationMode.AUTO,
    pb.SpeculationParams.MODE_OFF: SpeculationMode.OFF,
    pb.SpeculationParams.MODE_FIXED: SpeculationMode.FIXED,
}
_VERIFICATIONS = {
    pb.SpeculationParams.VERIFICATION_UNSPECIFIED: VerificationMode.EXACT_MATCH,
    pb.SpeculationParams.VERIFICATION_EXACT_MATCH: VerificationMode.EXACT_MATCH,
    pb.SpeculationParams.VERIFICATION_REJECTION: VerificationMode.REJECTION,
}
# The named value of each, not the unspecified one: it stands first and is overwritten.
_MODES_TO_PROTO = {mode: value for value, mode in _MODES.items()}
_VERIFICATIONS_TO_PROTO = {mode: value for value, mode in _VERIFICATIONS.items()}


class AnswerFields(Protocol):
    """A request message of either level."""

    @property
    def logprobs(self) -> int:
        """Optional."""

    @property
    def prompt_logprobs(self) -> int:
        """Optional."""

    @property
    def n(self) -> int:
        """Optional."""

    def HasField(self, name: str) -> bool:
        """Whether an optional field is set."""


def answer_from_proto(message: AnswerFields) -> AnswerParams:
    """Unset fields take the defaults of AnswerParams."""
    names = ("logprobs", "prompt_logprobs", "n")
    return AnswerParams(
        **{name: getattr(message, name) for name in names if message.HasField(name)}
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Unset fields take the defaults of SamplingParams."""
    names = (
        "temperature", "top_k", "top_p", "min_p", "seed",
        "repetition_penalty", "frequency_penalty", "presence_penalty",
    )  # fmt: skip
    given = {name: getattr(message, name) for name in names if message.HasField(name)}
    return SamplingParams(**given, logit_bias=tuple(sorted(message.logit_bias.items())))


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Every field is set, so that both ends agree whatever their defaults."""
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=dict(params.logit_bias),
    )


def stopping_from_proto(message: pb.StoppingParams) -> StoppingParams:
    """Unset fields take the defaults of StoppingParams."""
    return StoppingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
    )


def stopping_to_proto(params: StoppingParams) -> pb.StoppingParams:
    """For a target, which has ids: without what only text can tell."""
    return pb.StoppingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def speculation_from_proto(message: pb.SpeculationParams) -> SpeculationParams:
    """Raises InvalidParam for an enum value that this version does not know."""
    if message.mode not in _MODES:
        raise InvalidParam("speculation.mode", f"unknown value {message.mode}")
    verification = verification_from_proto("speculation.verification", message.verification)
    cap = message.max_draft_tokens if message.HasField("max_draft_tokens") else None
    return SpeculationParams(
        mode=_MODES[message.mode],
        max_draft_tokens=cap,
        verification=verification,
    )


def speculation_to_proto(params: SpeculationParams) -> pb.SpeculationParams:
    """`max_draft_tokens` stays unset if there is none."""
    return pb.SpeculationParams(
        mode=_MODES_TO_PROTO[params.mode],
        max_draft_tokens=params.max_draft_tokens,
        verification=verification_to_proto(params.verification),
    )


def verification_from_proto(
    field: str, value: pb.SpeculationParams.Verification
) -> VerificationMode:
    """Raises InvalidParam for a value that this version does not know."""
    if value not in _VERIFICATIONS:
        raise InvalidParam(field, f"unknown value {value}")
    return _VERIFICATIONS[value]


def verification_to_proto(mode: VerificationMode) -> pb.SpeculationParams.Verification:
    """The enum value on the wire."""
    return _VERIFICATIONS_TO_PROTO[mode]

"""How a request ended: an outcome, a code of gRPC's, and a reason without a word of its text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum

import grpc

from outrider.params import InvalidParam
from outrider.serving.deadline import Deadline
from outrider.serving.errors import OutriderError, TooLarge
from outrider.serving.open_calls import SHUTTING_DOWN

Code = grpc.StatusCode

_AT_THE_DOOR = (
    Code.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED,
    Code.NOT_FOUND,
    Code.RESOURCE_EXHAUSTED,
)


class Outcome(Enum):
    """Every request ends in one of these."""

    FINISHED = "finished"
    FAILED = "failed"
    """It had a claim to an answer and did not get it, in time or at all."""
    CANCELLED = "cancelled"
    """The client left."""
    REFUSED = "refused"
    """A bad request, or one too many: answered at the door."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended."""

    outcome: Outcome
    code: Code
    reason: str = ""

    @property
    def error_type(self) -> str:
        """The code as metrics, logs and spans name it; empty for a good end."""
        return "" if self.code is Code.OK else self.code.name.lower()


FINISHED = Ending(Outcome.FINISHED, Code.OK)


def judge(error: BaseException, *, delivering: bool, deadline: Deadline) -> Ending:
    """What `error` says of its request. delivering: part of the answer is on its way already."""
    if isinstance(error, asyncio.CancelledError) and SHUTTING_DOWN not in error.args:
        if deadline.passed:
            return Ending(Outcome.FAILED, Code.DEADLINE_EXCEEDED, "the client's deadline passed")
        return Ending(Outcome.CANCELLED, Code.CANCELLED, "the client left")
    # Who is closed in the middle of a message, and not cancelled, is closed by the shutdown.
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return Ending(Outcome.FAILED, Code.UNAVAILABLE, SHUTTING_DOWN)
    code, reason = _describe(error)
    refused = code in _AT_THE_DOOR and not delivering
    return Ending(Outcome.REFUSED if refused else Outcome.FAILED, code, reason)


def _describe(error: BaseException) -> tuple[Code, str]:
    if isinstance(error, InvalidParam):
        # Its message may quote what the client has sent.
        return Code.INVALID_ARGUMENT, f"{error.field} is not valid"
    if isinstance(error, TooLarge):
        return Code.INVALID_ARGUMENT, error.reason  # not one too many, but a bad one
    if isinstance(error, OutriderError):
        return error.code, error.reason
    return Code.INTERNAL, type(error).__name__

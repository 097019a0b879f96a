"""Errors that a caller sees, and the gRPC status each one becomes.

    OutriderError
    ├── InvalidRequest   INVALID_ARGUMENT     a field outside its limits, named
    ├── Unauthenticated  UNAUTHENTICATED      no key, or one that is not known
    ├── NotFound         NOT_FOUND            an unknown model
    ├── Incompatible     FAILED_PRECONDITION  two services that cannot work together
    ├── Overloaded       RESOURCE_EXHAUSTED   try again after `retry_after_s`
    ├── TooLarge         RESOURCE_EXHAUSTED   more than a message may hold; trying again is no use
    ├── DeadlinePassed   DEADLINE_EXCEEDED    the time that the request had is over
    ├── Unavailable      UNAVAILABLE          not ready, draining or lost
    └── EngineFailed     INTERNAL             a step failed

Knows nothing of how they travel: `interceptors.py` does.
"""

from __future__ import annotations

import grpc


class OutriderError(Exception):
    """Base of every error that is meant for a caller. `str(error)` is the message."""

    code = grpc.StatusCode.INTERNAL

    @property
    def reason(self) -> str:
        """The message as logs and traces may have it: it quotes nothing that a caller has sent."""
        return str(self)


class InvalidRequest(OutriderError):
    """A field of the request is outside its limits."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str, *, place: str = "") -> None:
        """place: the part of `field` that is no name of the caller's making; empty: all of it."""
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self._place = place or field

    @property
    def reason(self) -> str:
        """Where it is wrong. The message may quote what was sent."""
        return f"{self._place} is not valid"


class Unauthenticated(OutriderError):
    """The caller has not shown a key that is known here."""

    code = grpc.StatusCode.UNAUTHENTICATED


class NotFound(OutriderError):
    """The model that the request names does not exist here."""

    code = grpc.StatusCode.NOT_FOUND

    @property
    def reason(self) -> str:
        """Without the name."""
        return "this model is not served here"


class Incompatible(OutriderError):
    """Two services cannot work together: other vocabulary or protocol version."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Overloaded(OutriderError):
    """A queue is full. The answer carries RetryInfo."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLarge(OutriderError):
    """A message is larger than the limit, which the message names."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlinePassed(OutriderError):
    """The request did not end in the time that its client, or this service, allows."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unavailable(OutriderError):
    """Not ready yet, draining, or the service behind is lost."""

    code = grpc.StatusCode.UNAVAILABLE


class EngineFailed(OutriderError):
    """A step of the engine failed; the message says which."""

    code = grpc.StatusCode.INTERNAL

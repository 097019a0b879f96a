"""What an error says of its request: the outcome, the code, and a reason that quotes nothing."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gateway.ending import Outcome, judge
from gateway.target_client import TargetFailed
from outrider.params import InvalidParam
from outrider.serving.deadline import Deadline
from outrider.serving.errors import (
    EngineFailed,
    InvalidRequest,
    NotFound,
    Overloaded,
    TooLarge,
    Unavailable,
)
from outrider.serving.open_calls import SHUTTING_DOWN

Code = grpc.StatusCode
PATIENT = Deadline(None, None)


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (InvalidRequest("text", "said 'secret'"), Outcome.REFUSED, Code.INVALID_ARGUMENT),
        (InvalidParam("top_p", "said 'secret'"), Outcome.REFUSED, Code.INVALID_ARGUMENT),
        (NotFound("model: 'secret'"), Outcome.REFUSED, Code.NOT_FOUND),
        (Overloaded("full", 1.0), Outcome.REFUSED, Code.RESOURCE_EXHAUSTED),
        (TooLarge("4 MiB"), Outcome.REFUSED, Code.INVALID_ARGUMENT),
        (Unavailable("no target"), Outcome.FAILED, Code.UNAVAILABLE),
        (EngineFailed("a step failed"), Outcome.FAILED, Code.INTERNAL),
        (TargetFailed(Code.DEADLINE_EXCEEDED, "late"), Outcome.FAILED, Code.DEADLINE_EXCEEDED),
        (KeyError("secret"), Outcome.FAILED, Code.INTERNAL),
        (asyncio.CancelledError(), Outcome.CANCELLED, Code.CANCELLED),
        (asyncio.CancelledError(SHUTTING_DOWN), Outcome.FAILED, Code.UNAVAILABLE),
        (GeneratorExit(), Outcome.FAILED, Code.UNAVAILABLE),
    ],
)
def test_every_error_has_an_outcome(error: BaseException, outcome: Outcome, code: Code) -> None:
    """Bad requests and too many of them are refused; only who left is cancelled."""
    ending = judge(error, delivering=False, deadline=PATIENT)
    assert (ending.outcome, ending.code) == (outcome, code)
    assert ending.reason and "secret" not in ending.reason


def test_nothing_is_refused_in_the_middle_of_an_answer() -> None:
    """A target that is full when a request moves to it fails a request that was taken in."""
    ending = judge(Overloaded("full", 1.0), delivering=True, deadline=PATIENT)
    assert ending.outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("total_s", "remaining_s", "passed"),
    [
        (None, None, False),
        (0.5, 0.0, True),
        (0.5, 0.004, True),
        (0.5, 0.3, False),
        (60.0, 1.0, True),  # it travels in tenths of a second, and later in whole ones
        (60.0, 5.0, False),
        (3000.0, 20.0, True),
    ],
)
def test_a_call_that_ends_at_its_deadline_ended_because_of_it(
    total_s: float | None, remaining_s: float | None, passed: bool
) -> None:
    """Who leaves long before it has left by itself."""
    deadline = Deadline(total_s, remaining_s)
    assert deadline.passed is passed
    ending = judge(asyncio.CancelledError(), delivering=True, deadline=deadline)
    assert ending.outcome is (Outcome.FAILED if passed else Outcome.CANCELLED)
    assert ending.error_type == ("deadline_exceeded" if passed else "cancelled")

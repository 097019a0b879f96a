"""Settings on the wire: what one service writes, the next one reads."""

from __future__ import annotations

import itertools

import pytest

from outrider.params import SpeculationMode, SpeculationParams, StoppingParams, VerificationMode
from outrider.serving.wire import (
    sampling_from_proto,
    speculation_from_proto,
    speculation_to_proto,
    stopping_from_proto,
    stopping_to_proto,
)
from protos.outrider.v1 import sampling_pb2

STOPPING = StoppingParams(
    max_tokens=9,
    min_tokens=2,
    stop=("END", "\n"),
    stop_token_ids=(5, 7),
    ignore_eos=True,
    include_stop=True,
)


def test_stopping_as_it_comes() -> None:
    """Nothing is lost, and what is unset stays unset."""
    message = sampling_pb2.StoppingParams(
        max_tokens=9,
        min_tokens=2,
        stop=["END", "\n"],
        stop_token_ids=[5, 7],
        ignore_eos=True,
        include_stop=True,
    )
    assert stopping_from_proto(message) == STOPPING
    assert stopping_from_proto(sampling_pb2.StoppingParams()) == StoppingParams()


def test_a_target_gets_no_stop_strings() -> None:
    """It has no text to find them in; all the rest arrives."""
    message = stopping_to_proto(STOPPING)
    assert stopping_from_proto(message) == StoppingParams(9, 2, (), (5, 7), ignore_eos=True)


@pytest.mark.parametrize("cap", [None, 0, 4])
@pytest.mark.parametrize(
    ("mode", "verification"), list(itertools.product(SpeculationMode, VerificationMode))
)
def test_speculation_there_and_back(
    mode: SpeculationMode, verification: VerificationMode, cap: int | None
) -> None:
    """Every mode and way of checking has a value of its own, never the unspecified one."""
    params = SpeculationParams(mode, cap, verification)
    message = speculation_to_proto(params)
    assert message.mode and message.verification
    assert speculation_from_proto(message) == params


def test_what_is_not_said_is_auto_and_exact() -> None:
    """The defaults of a client that knows nothing of drafts."""
    assert speculation_from_proto(sampling_pb2.SpeculationParams()) == SpeculationParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 100.0),
        ("top_p", 1e-30),
        ("top_p", 1.0),
        ("min_p", 1.0),
        ("repetition_penalty", 1e-6),
        ("repetition_penalty", 1e6),
        ("frequency_penalty", -2.0),
        ("presence_penalty", 2.0),
    ],
)
def test_documented_limits_are_inside_once_they_have_travelled(field: str, value: float) -> None:
    """Numbers travel as float32, which lies beside some of them."""
    sampling_from_proto(sampling_pb2.SamplingParams(**{field: value})).validate(100)

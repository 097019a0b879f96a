"""The door: what cannot run is refused by the name of its field, before anything is held."""

from __future__ import annotations

import pytest

from outrider.engine.config import ModelConfig
from outrider.params import InvalidParam
from outrider.serving.errors import InvalidRequest
from protos.outrider.v1 import sampling_pb2, target_pb2
from target_service.admission import Door, Limits
from target_service.draft_tail import DraftTotals
from target_service.request import Request
from target_service.window import StepCost
from tests.support.target_parts import CollectedOutput

VOCAB, MAX_LEN, EOS = 100, 64, 7


def make_door() -> Door:
    """A small model's door."""
    model = ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_model_len=MAX_LEN,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        query_key_norms=False,
        tied_head=True,
        eos_token_ids=(EOS,),
    )
    return Door(model, Limits(MAX_LEN, 16, 10, 4, 8, 0.05), StepCost(), DraftTotals())


def make_message(**changes) -> target_pb2.TokenRequest:
    """A good request, but for `changes`."""
    fields = {
        "token_ids": [1, 2, 3],
        "sampling": sampling_pb2.SamplingParams(temperature=0.0),
        "stopping": sampling_pb2.StoppingParams(max_tokens=5),
    }
    return target_pb2.TokenRequest(**(fields | changes))


def admit(**changes) -> Request:
    """The request as it would run."""
    door, message = make_door(), make_message(**changes)
    return door.admit(message, door.check(message), CollectedOutput())[0]


SPECULATION, STOPPING = sampling_pb2.SpeculationParams, sampling_pb2.StoppingParams


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("token_ids", {"token_ids": []}),
        ("token_ids", {"token_ids": [1, VOCAB]}),
        ("token_ids", {"token_ids": [1] * MAX_LEN}),
        ("token_ids", {"token_ids": [1] * 60, "resumed_token_ids": [1] * 4}),
        ("resumed_token_ids", {"resumed_token_ids": [2**31]}),
        ("stopping.max_tokens", {"resumed_token_ids": [4] * 5}),
        ("stopping.max_tokens", {"stopping": STOPPING(max_tokens=0)}),
        ("stopping.min_tokens", {"stopping": STOPPING(max_tokens=2, min_tokens=3)}),
        ("stopping.stop", {"stopping": STOPPING(stop=["x"])}),
        ("stopping.stop_token_ids", {"stopping": STOPPING(stop_token_ids=[VOCAB])}),
        ("sampling.seed", {"sampling": sampling_pb2.SamplingParams(temperature=0.5)}),
        ("sampling.top_p", {"sampling": sampling_pb2.SamplingParams(temperature=0.0, top_p=2)}),
        ("speculation.max_draft_tokens", {"speculation": SPECULATION(max_draft_tokens=5)}),
        ("speculation.verification", {"speculation": SPECULATION(verification=99)}),
        ("priority", {"priority": 101}),
        ("request_id", {"request_id": "x" * 129}),
        ("cache_salt", {"cache_salt": b"x" * 129}),
        ("n", {"n": 17}),
        ("n", {"n": 11}),
        ("n", {"n": 0}),
        ("n", {"n": 2, "resumed_token_ids": [4]}),
        ("logprobs", {"logprobs": 21}),
    ],
)
def test_a_bad_field_is_named(field, changes):
    """Each limit has one answer, and the answer says which field."""
    with pytest.raises((InvalidRequest, InvalidParam)) as refusal:
        admit(**changes)
    assert refusal.value.field.split("[")[0] == field


def test_a_request_ends_where_its_limits_say():
    """The cap counts generated tokens, resumed ones included; the context is the last limit."""
    assert admit().max_len == 8
    resumed = admit(resumed_token_ids=[4, 5])
    assert (resumed.max_len, resumed.num_generated) == (8, 2)
    assert admit(stopping=STOPPING(max_tokens=1000)).max_len == MAX_LEN
    assert admit(stopping=STOPPING()).max_len == MAX_LEN


def test_stop_ids_hold_the_models_own_unless_ignored():
    """End-of-sequence ids stop a text like those that the caller names."""
    assert admit().stop_ids == {EOS}
    assert admit(stopping=STOPPING(stop_token_ids=[9])).stop_ids == {EOS, 9}
    assert admit(stopping=STOPPING(ignore_eos=True)).stop_ids == frozenset()


def test_only_requests_that_may_use_drafts_get_a_tail():
    """OFF and a cap of 0 leave drafters out of it altogether."""
    assert admit().drafts is not None
    assert admit(speculation=SPECULATION(mode=SPECULATION.MODE_OFF)).drafts is None
    assert admit(speculation=SPECULATION(max_draft_tokens=0)).drafts is None

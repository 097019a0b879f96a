"""Bad requests over gRPC, drawn from a grammar: each must be refused with its status."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2
from tests.support.bad_values import HORRORS, surprise

_SERVICE = "/outrider.v1.Inference"
_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_NOT_FOUND = grpc.StatusCode.NOT_FOUND
_UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
_NUMBERS = [float("nan"), float("inf"), float("-inf"), -1e30, 1e30, -2.5]

_Chance = random.Random
_Sampling = sampling_pb2.SamplingParams
_Stopping = sampling_pb2.StoppingParams
_Speculation = sampling_pb2.SpeculationParams


@dataclass(frozen=True)
class BadGrpc:
    """One call."""

    what: str
    """For whoever reads that it was answered otherwise."""
    method: str
    streams: bool
    """The answer is a stream."""
    data: bytes
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    code: grpc.StatusCode = _INVALID


def bad_grpc_requests(seed: int, count: int, vocab_size: int) -> Iterator[BadGrpc]:
    """The same ones for the same arguments."""
    chance = random.Random(seed)
    kinds: list[tuple[int, Callable[[_Chance], BadGrpc]]] = [
        (10, lambda chance: _bad_value(chance, vocab_size)),
        (4, _no_message),
        (2, _unknown_model),
        (2, lambda chance: _bad_side_call(chance, vocab_size)),
        (1, _unknown_method),
    ]
    makers = [maker for weight, maker in kinds for _ in range(weight)]
    for _ in range(count):
        yield chance.choice(makers)(chance)


def _good() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="one river", stopping=_Stopping(max_tokens=5))


def _above(chance: _Chance, limit: int) -> int:
    return chance.choice([limit + 1, chance.randint(limit + 1, 2**32 - 1), 2**32 - 1])


def _bad_id(chance: _Chance, vocab_size: int) -> int:
    return _above(chance, vocab_size - 1)


def _bad_input(chance: _Chance, vocab_size: int) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", content="x")
    odd = pb.ChatMessage(role=surprise(chance), content="x")
    long = pb.ChatMessage(role="user", content="x" * 600_000)
    ids = [chance.randrange(vocab_size) for _ in range(chance.randrange(5))]
    return chance.choice(
        [
            pb.GenerateRequest(),
            pb.GenerateRequest(text=""),
            pb.GenerateRequest(text="y " * 5000),
            pb.GenerateRequest(text="x" * 1_100_000),
            pb.GenerateRequest(token_ids=pb.TokenIds()),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*ids, _bad_id(chance, vocab_size)])),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 600)),
            pb.GenerateRequest(chat=pb.Chat()),
            pb.GenerateRequest(chat=pb.Chat(messages=[message, odd])),
            pb.GenerateRequest(chat=pb.Chat(messages=[message] * 4097)),
            pb.GenerateRequest(chat=pb.Chat(messages=[long, long])),
        ]
    )


def _bad_sampling(chance: _Chance, vocab_size: int) -> pb.GenerateRequest:
    bad = chance.choice(_NUMBERS)
    bias = {5: chance.choice([*_NUMBERS[:5], 100.5])}
    sampling = chance.choice(
        [
            _Sampling(temperature=bad),
            _Sampling(top_k=_above(chance, 2**31 - 1)),
            _Sampling(top_p=chance.choice([bad, 0.0])),
            _Sampling(min_p=bad),
            _Sampling(repetition_penalty=chance.choice([bad, 0.0])),
            _Sampling(frequency_penalty=bad),
            _Sampling(presence_penalty=bad),
            _Sampling(logit_bias={_bad_id(chance, vocab_size): 1}),
            _Sampling(logit_bias=bias),
            _Sampling(logit_bias=dict.fromkeys(range(1025), 0.0)),
        ]
    )
    return pb.GenerateRequest(text="one river", sampling=sampling)


def _bad_stopping(chance: _Chance, vocab_size: int) -> pb.GenerateRequest:
    stopping = chance.choice(
        [
            _Stopping(max_tokens=0),
            _Stopping(max_tokens=5, min_tokens=_above(chance, 5)),
            _Stopping(min_tokens=_above(chance, 600)),
            _Stopping(stop=["a", ""]),
            _Stopping(stop=["a"] * 17),
            _Stopping(stop=[chance.choice(HORRORS) + "s" * 512]),
            _Stopping(stop_token_ids=[1, _bad_id(chance, vocab_size)]),
            _Stopping(stop_token_ids=[5] * 65),
        ]
    )
    return pb.GenerateRequest(text="one river", stopping=stopping)


def _bad_rest(chance: _Chance, vocab_size: int) -> pb.GenerateRequest:
    fields = chance.choice(
        [
            {"speculation": _Speculation(mode=chance.choice([4, 77, 2**31 - 1, -1]))},
            {"speculation": _Speculation(verification=chance.choice([3, -(2**31)]))},
            {"speculation": _Speculation(max_draft_tokens=_above(chance, 1000))},
            {"logprobs": _above(chance, 20)},
            {"prompt_logprobs": _above(chance, 20)},
            {"n": chance.choice([0, _above(chance, 16)])},
            {"priority": chance.choice([101, -101, 2**31 - 1, -(2**31)])},
            {"request_id": chance.choice(HORRORS) + "r" * 129},
        ]
    )
    return pb.GenerateRequest(text="one river", **fields)


def _bad_value(chance: _Chance, vocab_size: int) -> BadGrpc:
    makers = [_bad_input, _bad_sampling, _bad_stopping, _bad_rest]
    request = chance.choice(makers)(chance, vocab_size)
    return BadGrpc(str(request)[:300], f"{_SERVICE}/Generate", True, request.SerializeToString())


def _no_message(chance: _Chance) -> BadGrpc:
    """A good request that goes on in a way that protobuf has no meaning for."""
    field = chance.choice([1, 2, 3])  # strings, all three
    noise = bytes(chance.randrange(256) for _ in range(chance.randint(0, 50)))
    bad = chance.choice(
        [
            bytes([field << 3 | 2, 0x7F]),  # cut off
            bytes([field << 3 | 2]) + b"\xff" * 4 + b"\x0f",  # 4 GB long
            bytes([field << 3 | 2]) + b"\xff" * 11,  # a length without an end
            bytes([field << 3 | 2, 2]) + chance.choice([b"\xff\xfe", b"\xed\xa0", b"\xc0\xaf"]),
            b"\x00" + noise,  # field 0
            b"\x0e" + noise,  # a type that does not exist
            b"\x0f" + noise,
            b"\x0c",  # the end of a group that has not begun
            b"\x0b",  # a group without an end
            b"\x48" + b"\xff" * 11,  # a number without an end
            b"\x48",  # nothing behind a number's name
            b"\x32\x02\x0d\x00",  # a float of one byte
            b"\x1a" * 1000 + b"\x7f",
        ]
    )
    return BadGrpc(repr(bad[:80]), f"{_SERVICE}/Generate", True, _good().SerializeToString() + bad)


def _unknown_model(chance: _Chance) -> BadGrpc:
    name = surprise(chance)
    methods: list[tuple[str, bool, bytes]] = [
        ("Generate", True, pb.GenerateRequest(model=name, text="x").SerializeToString()),
        ("Tokenize", False, pb.TokenizeRequest(model=name, text="x").SerializeToString()),
        ("Detokenize", False, pb.DetokenizeRequest(model=name, ids=[5]).SerializeToString()),
    ]
    method, streams, data = chance.choice(methods)
    what = f"{method} of model {name[:40]!r}"
    return BadGrpc(what, f"{_SERVICE}/{method}", streams, data, code=_NOT_FOUND)


def _bad_side_call(chance: _Chance, vocab_size: int) -> BadGrpc:
    chat = pb.Chat(messages=[pb.ChatMessage(role=surprise(chance), content="x")])
    requests: list[tuple[str, pb.TokenizeRequest | pb.DetokenizeRequest]] = [
        ("Tokenize", pb.TokenizeRequest()),
        ("Tokenize", pb.TokenizeRequest(text="")),
        ("Tokenize", pb.TokenizeRequest(chat=chat)),
        ("Detokenize", pb.DetokenizeRequest(ids=[5, _bad_id(chance, vocab_size)])),
    ]
    method, request = chance.choice(requests)
    data = request.SerializeToString() + chance.choice([b"", b"", b"\x0f"])
    return BadGrpc(f"{method} {str(request)[:200]}", f"{_SERVICE}/{method}", False, data)


def _unknown_method(chance: _Chance) -> BadGrpc:
    word = "".join(chance.choice("abcXYZ019._-%~") for _ in range(chance.randint(1, 40)))
    method = chance.choice([f"{_SERVICE}/{word}", f"/{word}/Generate", f"/{word}"])
    data = _good().SerializeToString()
    return BadGrpc(f"method {method}", method, chance.random() < 0.5, data, code=_UNIMPLEMENTED)

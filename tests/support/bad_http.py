"""Bad requests over HTTP, drawn from a grammar: each must be answered with a status of 4xx."""

from __future__ import annotations

import json
import random
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.support.bad_values import (
    HORRORS,
    NO_JSON,
    bad_integer,
    bad_number,
    other_types,
    surprise,
)
from tests.support.http_gateway import BODIES, CHAT, COMPLETIONS, HOST

_JSON_HEAD = {b"Content-Type": b"application/json"}
_METHODS = [b"GET", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"POSTS", b"post", b"M-X"]

_Chance = random.Random
_Value = Callable[[_Chance], str]


@dataclass(frozen=True)
class BadHttp:
    """One request."""

    what: str
    """For whoever reads that it was answered otherwise."""
    data: bytes
    status: int | None = None
    """If the answer has to be another one than 4xx."""
    is_http: bool = True
    """The server can know where it ends."""


def bad_http_requests(seed: int, count: int, vocab_size: int) -> Iterator[BadHttp]:
    """The same ones for the same arguments."""
    chance = random.Random(seed)
    kinds: list[tuple[int, Callable[[_Chance], BadHttp]]] = [
        (12, lambda chance: _bad_value(chance, vocab_size)),
        (3, _unknown_field),
        (3, _no_json),
        (2, _bad_head),
        (2, _wrong_turn),
        (2, _no_http),
        (1, _too_large),
    ]
    makers = [maker for weight, maker in kinds for _ in range(weight)]
    for _ in range(count):
        yield chance.choice(makers)(chance)


def _integer(low: int, high: int) -> _Value:
    return lambda chance: bad_integer(chance, low, high)


def _number(low: float, high: float) -> _Value:
    return lambda chance: bad_number(chance, low, high)


def _flag(chance: _Chance) -> str:
    return other_types(chance, "boolean")


def _one_of(*values: str) -> _Value:
    return lambda chance: chance.choice(values)


def _stops(chance: _Chance) -> str:
    stops = ['""', '["a", ""]', json.dumps(["a"] * 17), json.dumps("a" * 513), "[null]", '[["a"]]']
    return chance.choice([*stops, other_types(chance, "string", "list")])


def _bias(chance: _Chance) -> str:
    key = chance.choice([surprise(chance), "-1", "01", "1.0", " 1", "", str(2**32), str(10**30)])
    number = bad_number(chance, -100, 100)
    values = [json.dumps({key: 1}), f'{{"5": {number}}}', '{"5": null}']
    return chance.choice([*values, other_types(chance, "object")])


def _role(chance: _Chance) -> str:
    message = f'{{"role": {json.dumps(surprise(chance))}, "content": "x"}}'
    wrong_type = f'{{"role": {other_types(chance, "string")}, "content": "x"}}'
    return f"[{chance.choice([message, wrong_type])}]"


def _content(chance: _Chance) -> str:
    bad = ["null", "[]", '[{"type": "text"}]', '[{"type": "image_url"}]', '["x"]']
    content = chance.choice([*bad, other_types(chance, "string")])
    return f'[{{"role": "user", "content": {content}}}]'


def _messages(chance: _Chance) -> str:
    bad = ["null", "[]", "[[]]", "[{}]", '[{"role": "user"}]', '[{"content": "x"}]']
    return chance.choice([*bad, other_types(chance, "list")])


_EVERYWHERE: dict[str, _Value] = {
    "model": lambda chance: chance.choice(
        ["null", '""', json.dumps(surprise(chance)), other_types(chance, "string")]
    ),
    "stream": _flag,
    "n": _integer(1, 16),
    "stop": _stops,
    "seed": _integer(0, 2**64 - 1),
    "logit_bias": _bias,
    "max_tokens": _integer(1, 2**32 - 1),
    "min_tokens": _integer(0, 2**32 - 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "min_p": _number(0, 1),
    "top_k": _integer(0, 2**31 - 1),
    "repetition_penalty": _number(1e-6, 1e6),
    "user": lambda chance: chance.choice(['"%s"' % ("u" * 513), other_types(chance, "string")]),
    "ignore_eos": _flag,
    "include_stop_str_in_output": _flag,
    "priority": _integer(-100, 100),
    "stream_options": _one_of('{"include_usage": true}', '{"x": 1}', "[]", "true", '"all"'),
    "speculation": lambda chance: chance.choice(
        [
            f'{{"mode": {json.dumps(surprise(chance))}}}',
            f'{{"max_draft_tokens": {bad_integer(chance, 0, 2**32 - 1)}}}',
            '{"verification": "none"}',
            other_types(chance, "object"),
        ]
    ),
}
_FIELDS: dict[str, dict[str, _Value]] = {
    CHAT: {
        "messages": lambda chance: chance.choice([_messages, _role, _content])(chance),
        "max_completion_tokens": _integer(1, 2**32 - 1),
        "logprobs": _flag,
        "top_logprobs": _integer(0, 20),
        "tools": _one_of('[{"type": "function"}]', "{}", "0"),
        "response_format": _one_of('{"type": "json_object"}', '"text"', "[]"),
    },
    COMPLETIONS: {
        "logprobs": _integer(0, 20),
        "best_of": _integer(1, 1),
        "echo": _one_of("true", "0", '"no"'),
        "suffix": _one_of('"x"', "[]", "0"),
    },
}


def _prompt(vocab_size: int) -> _Value:
    def value(chance: _Chance) -> str:
        bad_id = chance.choice([bad_integer(chance, 0, vocab_size - 1), str(vocab_size), "null"])
        bad = [f"[5, {bad_id}]", '""', "[]", '["a", "b"]', "null", '"%s"' % ("x " * 5000)]
        return chance.choice([*bad, other_types(chance, "string", "list")])

    return value


def _bad_value(chance: _Chance, vocab_size: int) -> BadHttp:
    path = chance.choice([CHAT, COMPLETIONS])
    fields = _EVERYWHERE | _FIELDS[path]
    if path == COMPLETIONS:
        fields |= {"prompt": _prompt(vocab_size)}
    name = chance.choice(list(fields))
    value = fields[name](chance)
    body = {key: json.dumps(each) for key, each in BODIES[path].items()} | {name: value}
    text = ", ".join(f'"{key}": {each}' for key, each in body.items())
    return BadHttp(f"{path} {name}: {value[:200]}", _request(path, f"{{{text}}}".encode()))


def _unknown_field(chance: _Chance) -> BadHttp:
    path = chance.choice([CHAT, COMPLETIONS])
    name = surprise(chance)
    if chance.random() < 0.3:  # the same field twice
        body = f'{json.dumps(BODIES[path])[:-1]}, "model": "tiny"}}'.encode()
    else:
        body = json.dumps(BODIES[path] | {name: None}, ensure_ascii=chance.random() < 0.5).encode()
    return BadHttp(f"{path} a field {name[:40]!r}", _request(path, body))


def _no_json(chance: _Chance) -> BadHttp:
    path = chance.choice([CHAT, COMPLETIONS])
    body = chance.choice(NO_JSON)
    if chance.random() < 0.4:
        good = json.dumps(BODIES[path]).encode()
        body = good[: chance.randrange(len(good))]
    return BadHttp(f"{path} no JSON {body[:80]!r}", _request(path, body))


def _bad_head(chance: _Chance) -> BadHttp:
    path = chance.choice([CHAT, COMPLETIONS])
    horror = chance.choice(HORRORS).encode().translate(None, b"\0\r\n\x85")[:500]
    name, value = chance.choice(
        [
            (b"Content-Type", chance.choice([b"", b"text/plain", b"application/jsonx", horror])),
            (b"Content-Type", b"application/x-www-form-urlencoded"),
            (b"Content-Encoding", chance.choice([b"gzip", b"br", b"identity, gzip", b"x"])),
            (b"X-Request-Id", chance.choice([b"x" * 129, b"a b", b"\xe9", b"\xff" * 10])),
            (b"X-Request-Timeout", chance.choice([b"0", b"-1", b"1e9", b"soon", b"9" * 99, b"+1"])),
            (b"X-Padding", b"x" * 17_000),
        ]
    )
    body = json.dumps(BODIES[path]).encode()
    head = _JSON_HEAD | {name: value}
    return BadHttp(f"{path} {name!r}: {value[:80]!r}", _request(path, body, head))


def _wrong_turn(chance: _Chance) -> BadHttp:
    if chance.random() < 0.5:
        method, path = chance.choice(_METHODS), chance.choice([CHAT, COMPLETIONS])
    else:
        method = chance.choice([b"GET", b"POST"])
        strange = urllib.parse.quote(surprise(chance)[:300].encode())
        paths = ["/", "//", "/v1", f"{CHAT}/", f"/v1/{strange}", f"/{strange}", "/v1/%00", "/%"]
        path = chance.choice(
            [*paths, "/V1/MODELS", f"/v1/models/{strange}", "*", "/v1/../v1/models/x"]
        )
    body = json.dumps(BODIES[CHAT]).encode()
    return BadHttp(f"{method!r} {path[:80]}", _request(path, body, method=method))


def _no_http(chance: _Chance) -> BadHttp:
    host = b"Host: x\r\n"
    line = b"POST /v1/completions HTTP/1.1\r\n"
    bad = [
        bytes(chance.randrange(256) for _ in range(chance.randint(1, 60))) + b"\x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS where there is none
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST\r\n\r\n",
        b"POST /v1/completions\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n" + host + b"\r\n",
        b"POST /v1/completions HTTP/1.1 x\r\n" + host + b"\r\n",
        b"POST  /v1/completions  HTTP/1.1\r\n" + host + b"\r\n",
        b"POST /v1/\xff\xfe HTTP/1.1\r\n" + host + b"\r\n",
        line + b"\r\n",  # no host
        line + host + host + b"\r\n",
        line + host + b"Content-Length: -1\r\n\r\n",
        line + host + b"Content-Length: 1e3\r\n\r\n",
        line + host + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n",
        line + host + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        line + host + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        line + host + b"no colon\r\n\r\n",
        line + host + b"bad name: x\r\n\r\n",
        line + host + b"X: \x00\r\n\r\n",
        line + host + b"X: " + b"x" * 40_000 + b"\r\n\r\n",
        line + host + b"X: x\r\n" * 6_000 + b"\r\n",
    ]
    if chance.random() < 0.03:  # HTTP itself wants 501 for it
        data = line + host + b"Transfer-Encoding: gzip\r\n\r\n"
        return BadHttp("an unknown coding", data, 501, False)
    data = chance.choice(bad)
    return BadHttp(f"no HTTP {data[:80]!r}", data, is_http=False)


def _too_large(chance: _Chance) -> BadHttp:
    path = chance.choice([CHAT, COMPLETIONS])
    if chance.random() < 0.5:
        body = json.dumps(BODIES[path] | {"user": "u" * 5_000_000}).encode()
    else:
        many = [{"role": "user", "content": "x"}] * 5000
        body = json.dumps(BODIES[CHAT] | {"messages": many}).encode()
    return BadHttp(f"{path} {len(body)} bytes", _request(path, body))


def _request(
    path: str, body: bytes, head: dict[bytes, bytes] = _JSON_HEAD, method: bytes = b"POST"
) -> bytes:
    lines = {b"Host": HOST.encode(), b"Content-Length": str(len(body)).encode()} | head
    text = b"".join(b"%b: %b\r\n" % each for each in lines.items())
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, path.encode(), text, body)

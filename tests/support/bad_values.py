"""Values that no field takes, drawn from a grammar: as the text of JSON, and as plain strings.

Whatever comes from here is bad for certain, so a service that takes it is wrong. Knows nothing of
the services.
"""

from __future__ import annotations

import json
import random

HORRORS = [
    "\u202eevil\u202c",
    "\ufeff",
    "\x00",
    "\x1b[2J\x1b]0;title\x07",
    "Z\u0351\u0489\u0310\u0367" * 20,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 9,
    "\u0661\u0662\u0663",
    "\uff11\uff12",
    "\ud7ff\ue000\uffff\U0010ffff",
    "\r\n\r\nHTTP/1.1 200 OK",
    "../../etc/passwd",
    "%s%n{0}${x}",
    "'; --",
    "null",
    "\u2028\u2029\u0085",
    "\xad\u200b\u2060",
    "\u01c4\u1e9e\u0130\u0131",
    "a" * 3000,
]
"""Strings with which something has gone wrong before, somewhere."""

NO_JSON = [
    b"",
    b" ",
    b"{",
    b"}",
    b"{]",
    b"{'model': 'x'}",
    b'{"model": "x",}',
    b'{"model": x}',
    b'{"model" "x"}',
    b'{"model": "x"} {"model": "x"}',
    b'{"model": "x"}\x00',
    b'{"model": "\t"}',
    b'{"model": "\\x41"}',
    b'{"model": 01}',
    b'{"model": +1}',
    b'{"model": .5}',
    b'{"model": 0x10}',
    b'{"model": nan}',
    b'{"model": undefined}',
    b'{"model": NaN}',
    b'{"model": -Infinity}',
    b'// {"model": "x"}',
    b'\xef\xbb\xbf{"model": "x"}',
    '{"model": "x"}'.encode("utf-16"),
    '{"model": "x"}'.encode("utf-32"),
    b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    b"model=x&prompt=y",
    b"\xff" * 50,
    b'{"model": "\xc0\xaf"}',
    b'{"model": "\xed\xa0\x80"}',
    b'{"model": "\\ud800"}',
    b"[" * 50_000,
    b'{"a":' * 50_000,
    b"[1]",
    b"null",
    b"true",
    b"12",
    b'"text"',
    b"1" * 50_000,
]
"""Bodies that are no JSON, or no object."""


def surprise(chance: random.Random) -> str:
    """A string that nobody expects, and that no list of names or words holds."""
    text = chance.choice(HORRORS)
    if chance.random() < 0.3:
        text += chance.choice(HORRORS)
    return text + "?"


def other_types(chance: random.Random, *mine: str) -> str:
    """JSON of another type than these: string, number, boolean, list, object; never null."""
    kinds = {
        "string": [json.dumps(chance.choice(HORRORS)), '"1"', '"true"', '"0.5"'],
        "number": ["0", "1", "-1", "0.5", "1e5"],
        "boolean": ["true", "false"],
        "list": ["[null]", "[[[[]]]]", "[true]", "[{}]"],
        "object": ['{"a": 1}', '{"": null}', '{"text": {"text": {}}}'],
    }
    kind = chance.choice([each for each in kinds if each not in mine])
    return chance.choice(kinds[kind])


def bad_integer(chance: random.Random, low: int, high: int) -> str:
    """JSON that is no integer from low to high."""
    return chance.choice(
        [
            str(low - 1),
            str(low - chance.randint(1, 2**31)),
            str(high + 1),
            str(high + chance.randint(1, 2**62)),
            str(-(2**63)),
            str(2**64),
            str(10 ** chance.randint(25, 400)),
            "9" * 5000,
            "1.5",
            "1e999",
            "-1e999",
            f"{low}.000001",
            other_types(chance, "number"),
        ]
    )


def bad_number(chance: random.Random, low: float, high: float) -> str:
    """JSON that is no number from low to high."""
    return chance.choice(
        [
            str(low - 10 ** chance.uniform(-3, 9)),
            str(high + 10 ** chance.uniform(-3, 9)),
            str(10 ** chance.randint(25, 400)),
            "1e308",
            "1e999",
            "-1e999",
            "NaN",
            other_types(chance, "number"),
        ]
    )

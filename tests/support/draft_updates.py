"""Updates of a target to a drafter, for tests that write them one by one."""

from __future__ import annotations

from protos.outrider.v1 import draft_pb2
from tests.support.draft_stream import make_open

LOOP = [5, 6, 7, 8, 9, 5, 6]
"""A prompt behind which an n-gram drafter proposes 7, 8, 9, 5, 6 and so on."""


def make_update(sequence_id: int = 1, **fields: object) -> draft_pb2.SequenceUpdate:
    """An update that opens a sequence, but for `fields`."""
    default = {"epoch": 1, "update_seq": 1, "base_len": 0, "tokens": LOOP, "window": 4}
    if "base_len" not in fields and "open" not in fields:
        fields["open"] = make_open(prompt_len=len(LOOP))
    return draft_pb2.SequenceUpdate(sequence_id=sequence_id, **(default | fields))

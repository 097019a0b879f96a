"""What both ends of the draft protocol must agree on, in one place (see draft.proto)."""

from __future__ import annotations

from outrider.serving.errors import Incompatible
from protos.outrider.v1 import draft_pb2

PROTOCOL_MAJOR, PROTOCOL_MINOR = 1, 0
MAX_FRAME_BYTES = 64 * 1024
"""Frames of either side are at most this large, so that no sequence waits long behind others."""

MAX_HELLO_BYTES = 4096
"""Names and capabilities of a peer, which are kept, logged and told on."""


def protocol_version() -> draft_pb2.ProtocolVersion:
    """The version that this code speaks."""
    return draft_pb2.ProtocolVersion(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR)


def check_compatible(target: draft_pb2.Hello, drafter: draft_pb2.Hello) -> None:
    """Raise Incompatible, naming both sides, unless the two can work together.

    One minor version of skew works. A side without a token table proposes from ids alone, or takes
    anything, and so matches every table.
    """
    for side, hello in (("target", target), ("drafter", drafter)):
        if hello.ByteSize() > MAX_HELLO_BYTES:
            raise Incompatible(
                f"the {side}'s Hello may have {MAX_HELLO_BYTES} bytes, got {hello.ByteSize()}"
            )
    targets, drafters = target.protocol_version, drafter.protocol_version
    if targets.major != drafters.major or abs(targets.minor - drafters.minor) > 1:
        raise Incompatible(
            f"protocol versions differ: target {targets.major}.{targets.minor}, "
            f"drafter {drafters.major}.{drafters.minor}"
        )
    both = target.token_table_hash and drafter.token_table_hash
    if both and target.token_table_hash != drafter.token_table_hash:
        raise Incompatible(
            f"token tables differ: target {target.token_table_hash.hex()}, "
            f"drafter {drafter.token_table_hash.hex()}"
        )

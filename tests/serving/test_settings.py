"""Settings are checked where they are made, and the message names them."""

from __future__ import annotations

import math

import pytest

from outrider.serving.settings import (
    DraftSettings,
    GatewaySettings,
    SettingsError,
    TargetSettings,
    split_addresses,
)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (TargetSettings, "draft_wait_ms", math.nan),
        (TargetSettings, "stall_s", math.nan),
        (TargetSettings, "grace_s", math.inf),
        (TargetSettings, "dtype", "int3"),
        (TargetSettings, "log_level", "LOUD"),
        (TargetSettings, "drafters", "127.0.0.1"),
        (TargetSettings, "drafters", "127.0.0.1:99999"),
        (TargetSettings, "drafters", "a:1,b,c:3"),
        (TargetSettings, "port", 65536),
        (GatewaySettings, "targets", "host:port"),
        (DraftSettings, "proposer", "oracle"),
        (DraftSettings, "max_window", 0),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(make: type, name: str, value: object) -> None:
    """Numbers that are none, names that nobody knows, addresses without a port."""
    with pytest.raises(SettingsError, match=name):
        make(**{name: value})


def test_addresses_are_split_and_blanks_dropped() -> None:
    """One setting holds several."""
    assert split_addresses("a:1, b:2 ,,[::1]:3") == ["a:1", "b:2", "[::1]:3"]
    assert TargetSettings(drafters="a:1, b:2 ,,[::1]:3").drafters

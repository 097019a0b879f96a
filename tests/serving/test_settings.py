"""Settings are checked where they are made, and the message names them."""

from __future__ import annotations

import math
import subprocess
import sys

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
        (TargetSettings, "drafters", "draft..svc:50053"),
        (TargetSettings, "port", 65536),
        (GatewaySettings, "targets", "host:port"),
        (DraftSettings, "proposer", "oracle"),
        (TargetSettings, "drafters", "a:" + "1" * 5000),
        (TargetSettings, "threads", 1_000_000),
        (TargetSettings, "model", "\udce9"),
        (DraftSettings, "max_window", 0),
        (DraftSettings, "ngram_max", 9),
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


@pytest.mark.parametrize("module", ["main", "generate", "chat", "up", "doctor", "config", "demo"])
def test_a_client_needs_nothing_to_watch_a_service(module: str) -> None:
    """The command line works in an install without the libraries of traces and metrics."""
    code = f"""
import sys
absent = ("opentelemetry", "prometheus_client", "uvicorn")
for name in absent:
    sys.modules[name] = None  # as if it was not installed
import outrider.cli.{module}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=15)

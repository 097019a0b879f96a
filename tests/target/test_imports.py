"""The target's policy stands alone."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["scheduler", "window", "draft_tail", "draft_link", "request"])
def test_policy_knows_neither_torch_nor_grpc_nor_asyncio(module):
    """These files can be read, tested and simulated without a device or a network."""
    script = (
        f"import sys, target_service.{module}\n"
        "print(*{'torch', 'grpc', 'asyncio', 'google.protobuf'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.split() == []

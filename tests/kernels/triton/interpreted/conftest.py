"""Tests of kernels in Triton's interpreter: collected only with TRITON_INTERPRET=1.

tests/kernels/triton/test_interpreter.py runs them so. A launch in a form that no table lists, or
with other types than listed, is an error here.
"""

from __future__ import annotations

import os

import pytest

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETS else ["test_*.py"]

if INTERPRETS:
    from tests.kernels.triton import interpreter

    interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the interpreter's own: loop bounds that numpy 2.4 refuses, and maxima of NaN alone."""
    if INTERPRETS:
        ignored = ("Conversion of an array:DeprecationWarning", "All-NaN slice:RuntimeWarning")
        for item in items:
            for warning in ignored:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))
            item.add_marker(pytest.mark.timeout(120))  # it is slow, and slower on a busy machine

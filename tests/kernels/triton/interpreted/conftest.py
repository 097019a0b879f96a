"""Tests of kernels in Triton's interpreter: collected only with TRITON_INTERPRET=1.

tests/kernels/triton/test_interpreter.py runs them so. A launch in a form that no table lists, or
with other types than listed, is an error here.
"""

from __future__ import annotations

import os

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETS else ["test_*.py"]

if INTERPRETS:
    from tests.kernels.triton import interpreter

    interpreter.install()

"""Imports what the services import, so that Python keeps all of it compiled.

For `make`, which runs it with PYTHONDONTWRITEBYTECODE empty. Nothing else is done with the modules.
"""

from __future__ import annotations

import importlib
import sys

MODULES = (
    "outrider.cli.main",
    "outrider.cli.up",
    "outrider.models.fetch",
    "gateway.service",
    "target_service.service",
    "draft_service.service",
    "draft_service.proposers.model",
)

if __name__ == "__main__":
    if sys.dont_write_bytecode:
        sys.exit("Python is told to keep nothing compiled: PYTHONDONTWRITEBYTECODE must be empty")
    for name in MODULES:
        importlib.import_module(name)

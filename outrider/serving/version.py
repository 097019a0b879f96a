"""Which Outrider this is, for whoever watches it."""

from __future__ import annotations

import importlib.metadata

try:
    VERSION = importlib.metadata.version("outrider")
except importlib.metadata.PackageNotFoundError:  # run from a source tree that nobody installed
    VERSION = "unknown"

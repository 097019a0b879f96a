"""Root of what can go wrong with a model's files, wherever they are read. Imports nothing."""

from __future__ import annotations


class ModelError(ValueError):
    """The model cannot be used; the message says why and names the file or what to do next.

    Raised as it is by the engine and the gateway; see `outrider.models.errors` for finding and
    fetching one.
    """

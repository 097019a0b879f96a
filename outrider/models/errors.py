"""What can go wrong with a named model; every message says what to do next.

ModelError          of `outrider.model_error`; by itself: files that cannot be used
├── UnknownModel    no such name and no such folder
├── NotFetched      a known name whose folder is not in the cache yet
└── FetchFailed     the download, a hash or the conversion
"""

from __future__ import annotations

from outrider.model_error import ModelError


class UnknownModel(ModelError):
    """Neither a name from the catalogue nor a model folder."""


class NotFetched(ModelError):
    """In the catalogue, not in the cache."""


class FetchFailed(ModelError):
    """Nothing was left behind; the fetch can be tried again."""

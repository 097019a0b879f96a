"""What can go wrong with a named model; every message says what to do next.

ModelError
├── UnknownModel    no such name and no such folder
├── NotFetched      a known name whose folder is not in the cache yet
└── FetchFailed     the download, a hash or the conversion
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of all of them."""


class UnknownModel(ModelError):
    """Neither a name from the catalogue nor a model folder."""


class NotFetched(ModelError):
    """In the catalogue, not in the cache."""


class FetchFailed(ModelError):
    """Nothing was left behind; the fetch can be tried again."""

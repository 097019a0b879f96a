"""Which precision the models of a test run in, where the test does not say one itself.

`pytest --dtype int8 …` and the fixture `each_dtype` (see tests/conftest.py) choose it. Else it is
what a user gets: the settings' own default.
"""

from __future__ import annotations

import os

VARIABLE = "TEST_DTYPE"
"""Where they leave it. A variable, so that services in other processes have it as well."""
EACH = ("float32", "int8")
"""What `each_dtype` stands for: exact products, and what the CPU's default makes of most models."""


def chosen_dtype() -> str:
    """The dtype of a target's or a draft's settings, and of a model that is to equal them."""
    return os.environ.get(VARIABLE, "auto")

"""The choices that `bench.beside` compares, as they are written."""

from __future__ import annotations

import pytest

from bench.beside import Choice


def test_a_choice_is_read_as_it_is_shown() -> None:
    """Threads of the target, of the draft, microseconds."""
    choice = Choice.read("2+1:50")
    assert choice == Choice(target_threads=2, draft_threads=1, spin_us=50)
    assert str(choice) == "2+1:50"


@pytest.mark.parametrize("text", ["", "2+1", "2:50", "2+1:x", "2+1:50,1+1:50", "-2+1:5"])
def test_what_is_no_choice_is_refused(text: str) -> None:
    """The message shows one."""
    with pytest.raises(ValueError, match="such as 2\\+1:50"):
        Choice.read(text)

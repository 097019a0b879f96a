"""How long a process has been there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from outrider.serving.process_age import process_age_s

AGES = """
import time
from outrider.serving.process_age import process_age_s
first = process_age_s()
time.sleep(0.2)
print(first, process_age_s())
"""


def test_it_counts_from_the_start_of_the_process() -> None:
    """More than nothing at the first call, never more than its parent has waited, and it grows."""
    begin_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", AGES], capture_output=True, text=True, check=True)
    waited_s = time.monotonic() - begin_s
    first_s, later_s = map(float, done.stdout.split())
    assert 0 < first_s <= later_s - 0.2
    assert later_s <= waited_s + 0.02  # the kernel's ticks are hundredths


def test_where_linux_does_not_say_it_still_grows(tmp_path: Path) -> None:
    """Then it counts from the import."""
    first_s = process_age_s(tmp_path / "missing")
    time.sleep(0.01)
    assert process_age_s(tmp_path / "missing") >= first_s + 0.01
    (tmp_path / "short").write_text("1 (python) S 1")
    assert process_age_s(tmp_path / "short") >= first_s

"""The energy meter, over a folder that looks like the kernel's."""

from __future__ import annotations

from pathlib import Path

from outrider.serving.energy import EnergyMeter

RANGE_UJ = 262_143_328_850


def make_zone(folder: Path, zone: str, name: str, energy_uj: int) -> Path:
    """One counter of the kernel's; returns the file that grows."""
    path = folder / zone
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    return path / "energy_uj"


def test_it_sums_packages_and_memory_and_no_part_twice(tmp_path: Path) -> None:
    """Two sockets, one with memory of its own; cores are in their package already."""
    first = make_zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    core = make_zone(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    dram = make_zone(tmp_path, "intel-rapl:0:1", "dram", 7)
    second = make_zone(tmp_path, "intel-rapl:1", "package-1", 0)
    whole = make_zone(tmp_path, "intel-rapl:2", "psys", 0)
    meter = EnergyMeter(tmp_path)
    assert meter.joules() == 0.0
    for file, energy_uj in [
        (first, 7_500_000),
        (core, 9_000_000),
        (dram, 250_007),
        (second, 1_000_000),
        (whole, 99_000_000),
    ]:
        file.write_text(f"{energy_uj}\n")
    assert meter.joules() == 2.5 + 0.25 + 1.0
    assert meter.joules() == 3.75


def test_a_counter_that_starts_again_does_not_make_the_figure_fall(tmp_path: Path) -> None:
    """It wraps at its range; what it took on both sides of that counts."""
    file = make_zone(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    meter = EnergyMeter(tmp_path)
    file.write_text("2000000\n")
    assert meter.joules() == 3.0


def test_without_counters_there_is_no_figure(tmp_path: Path) -> None:
    """No folder, an empty one, and a counter that is no number."""
    assert EnergyMeter(tmp_path / "nothing").joules() is None
    assert EnergyMeter(tmp_path).joules() is None
    make_zone(tmp_path, "intel-rapl:0", "package-0", 0).write_text("?")
    assert EnergyMeter(tmp_path).joules() is None


def test_a_counter_that_can_no_longer_be_read_ends_the_figure(tmp_path: Path) -> None:
    """Part of a sum would look like a drop to whoever draws it."""
    make_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    gone = make_zone(tmp_path, "intel-rapl:1", "package-1", 0)
    meter = EnergyMeter(tmp_path)
    assert meter.joules() == 0.0
    gone.unlink()
    assert meter.joules() is None

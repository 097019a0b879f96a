"""Rules and alerts: Prometheus takes them, they fire when they should, and each is explained."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.dashboards import PROMETHEUS, ROOT, recordings, rules, selectors

CASES = Path(__file__).parent / "alerts_test.yml"
GUIDE = ROOT / "docs" / "operations.md"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not here: apt-get install --no-install-recommends prometheus",
)


def promtool(*arguments: str | Path) -> None:
    """Run it; what it says is the message of a failure."""
    answer = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=100
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


@needs_promtool
def test_prometheus_takes_the_configuration() -> None:
    """The file of scrapes and the files that it names are valid."""
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


@needs_promtool
def test_no_rule_is_there_twice() -> None:
    """Rules and alerts pass every lint that promtool has."""
    files = (PROMETHEUS / "rules.yml", PROMETHEUS / "alerts.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", *files)


@needs_promtool
@pytest.mark.timeout(120)
def test_alerts_fire_when_they_should_and_only_then() -> None:
    """The cases of alerts_test.yml hold: each alert fires in one, and not for its neighbours."""
    promtool("test", "rules", CASES)


def test_every_alert_has_a_case_that_fires() -> None:
    """No alert is there that nothing has ever set off."""
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {
        case["alertname"]
        for test in cases
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert fired == {alert["alert"] for alert in rules("alerts.yml")}


def test_every_alert_is_explained() -> None:
    """Each has a severity, a summary, and a section of the guide that its runbook leads to; the
    guide explains no alert that is gone."""
    names = [alert["alert"] for alert in rules("alerts.yml")]
    assert len(names) == len(set(names))
    for alert in rules("alerts.yml"):
        assert alert["labels"]["severity"] in ("page", "ticket", "info")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"
    headings = [line.lstrip("# ") for line in GUIDE.read_text().splitlines() if line[:1] == "#"]
    assert [name for name in headings if name.startswith("Outrider")] == names


def test_alerts_read_only_recordings_that_exist() -> None:
    """A name with colons is one that rules.yml records."""
    read = {s.name for alert in rules("alerts.yml") for s in selectors(alert["expr"])}
    assert {name for name in read if ":" in name} <= recordings()

"""Dashboards as Grafana loads them: well formed, told apart, explained, and without NaN."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import combinations
from typing import Any

import pytest
import yaml

from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings
from tests.support.dashboards import (
    COMPOSE,
    DASHBOARDS,
    Selector,
    dashboards,
    panel_queries,
    panels,
    recordings,
    rule_queries,
    selectors,
)

PROVISIONING = COMPOSE / "grafana" / "provisioning"
BUILT_IN = {"__rate_interval", "__range"}
each_dashboard = pytest.mark.parametrize(
    "dashboard", dashboards(), ids=[path.stem for path in DASHBOARDS]
)


def closed(text: str) -> str:
    """The text up to the parenthesis that closes the one it begins with."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1]
    raise AssertionError(f"a parenthesis stays open: {text}")


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether two rectangles share a cell."""
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


def test_there_are_three_dashboards_told_apart_by_uid_and_title() -> None:
    """Links and bookmarks name a dashboard by its uid; the file's name is its last part."""
    assert [path.stem for path in DASHBOARDS] == ["capacity", "overview", "speculation"]
    assert [d["uid"] for d in dashboards()] == [f"outrider-{path.stem}" for path in DASHBOARDS]
    assert len({d["title"] for d in dashboards()}) == len(DASHBOARDS)


@each_dashboard
def test_panels_are_told_apart_and_explained(dashboard: dict[str, Any]) -> None:
    """Ids are unique; each panel has a title, a description, a unit, and a legend for each line."""
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels(dashboard):
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(references) == len(set(references)), panel["title"]
        if panel["type"] != "stat":
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


@each_dashboard
def test_panels_lie_side_by_side(dashboard: dict[str, Any]) -> None:
    """No two of them overlap, none leaves the 24 columns, and there are no holes between rows."""
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert not [pair for pair in combinations(places, 2) if overlap(*pair)]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    covered = {y for place in places for y in range(place["y"], place["y"] + place["h"])}
    assert covered == set(range(max(covered) + 1))


@each_dashboard
def test_variables_are_declared_and_used(dashboard: dict[str, Any]) -> None:
    """Every `$name` in a query is a variable of the dashboard, and every variable is asked for."""
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {
        name
        for panel in panels(dashboard)
        for text in [panel["datasource"]["uid"], *(target["expr"] for target in panel["targets"])]
        for name in re.findall(r"\$\{?(\w+)", text)
    }
    assert used - BUILT_IN == declared


def test_no_query_gives_nan() -> None:
    """What is divided by is a number, or is filtered to be above 0; a quantile of nothing, which is
    NaN, is filtered out. Then an idle service gives no line instead of an impossible one."""
    for query in panel_queries() + rule_queries():
        text = re.sub(r"\s+", " ", query.expr)
        for rest in text.split(" / ")[1:]:
            divisor = re.sub(r"^on \([^)]*\) group_left \([^)]*\) ", "", rest)
            number = re.match(r"[\d.]+( |$)", divisor)
            assert number or closed(divisor).endswith("> 0)"), query
        for part in text.split("histogram_quantile")[1:]:
            assert part.removeprefix(closed(part)).startswith(" >= 0"), query


def test_recordings_on_panels_exist() -> None:
    """A name with colons is one that rules.yml records."""
    read = {selector.name for query in panel_queries() for selector in selectors(query.expr)}
    assert {name for name in read if ":" in name} <= recordings()


def test_the_provisioned_source_is_the_one_that_dashboards_start_with() -> None:
    """A dashboard's own choice of data source is the uid that provisioning gives Prometheus."""
    text = (PROVISIONING / "datasources" / "datasources.yaml").read_text()
    sources = {each["type"]: each for each in yaml.safe_load(text)["datasources"]}
    assert set(sources) == {"prometheus", "jaeger"}
    assert sources["prometheus"]["isDefault"]
    for dashboard in dashboards():
        source = next(v for v in dashboard["templating"]["list"] if v["name"] == "datasource")
        assert source["current"]["value"] == sources["prometheus"]["uid"]


def test_files_are_mounted_where_the_programs_look_for_them() -> None:
    """compose.yaml puts dashboards where provisioning says they are, and every rule file beside
    Prometheus's configuration."""
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    mounts = dict(
        mount.split(":")[:2]
        for name in ("grafana", "prometheus")
        for mount in services[name]["volumes"]
        if mount.startswith("./")
    )
    text = (PROVISIONING / "dashboards" / "dashboards.yaml").read_text()
    (provider,) = yaml.safe_load(text)["providers"]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    config = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())
    for name in ["prometheus.yml", *config["rule_files"]]:
        assert mounts[f"./prometheus/{name}"] == f"/etc/prometheus/{name}"
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]


def test_scraped_names_are_services_of_the_stack() -> None:
    """Each job scrapes the service of its name, at the port that it shows metrics on."""
    config = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())
    found = {}
    for job in config["scrape_configs"]:
        addresses = [a for each in job.get("static_configs", []) for a in each["targets"]]
        addresses += [
            f"{name}:{each['port']}"
            for each in job.get("dns_sd_configs", [])
            for name in each["names"]
        ]
        found[job["job_name"]] = addresses
    defaults = {"gateway": GatewaySettings, "target": TargetSettings, "draft": DraftSettings}
    ports = {
        name: next(f.default for f in fields(settings) if f.name == "metrics_port")
        for name, settings in defaults.items()
    }
    assert found == {name: [f"{name}:{port}"] for name, port in ports.items()}


def test_rates_know_how_often_is_scraped() -> None:
    """`$__rate_interval` is made from the interval that the source is said to scrape at."""
    text = (PROVISIONING / "datasources" / "datasources.yaml").read_text()
    source = yaml.safe_load(text)["datasources"][0]
    scraping = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"]


def test_selectors_are_found_whatever_stands_around_them() -> None:
    """The reader of PromQL that these tests lean on sees each selector and nothing else."""
    expr = """
      sum by (le, job) (rate(a_bucket{job="x", kind=~"b|c"}[5m])) / on (instance) group_left ()
      (count without (k) (d:e) > 0) and on () vector(1) or min_over_time(f[10m:1m]) * g offset 5m
    """
    assert selectors(expr) == [
        Selector("a_bucket", (("job", "=", "x"), ("kind", "=~", "b|c"))),
        Selector("d:e", ()),
        Selector("f", ()),
        Selector("g", ()),
    ]

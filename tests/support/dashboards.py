"""Dashboards, rules and alerts as the repository has them, and what their PromQL reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
DASHBOARDS = sorted((COMPOSE / "grafana" / "dashboards").glob("*.json"))
PROMETHEUS = COMPOSE / "prometheus"

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<matchers>\{[^}]*\}) | (?P<range>\[[^\]]*\]) | (?P<text>"[^"]*")
    | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*) | (?P<number>[0-9.][0-9a-z.]*) | (?P<other>.)
    )""",
    re.VERBOSE | re.DOTALL,
)
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_AGGREGATIONS = {"sum", "avg", "min", "max", "count"}


@dataclass(frozen=True)
class Query:
    """One PromQL expression and where it stands."""

    place: str
    expr: str


@dataclass(frozen=True)
class Selector:
    """The series that an expression reads: a name, and label, operator, value of each matcher."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    @property
    def jobs(self) -> set[str]:
        """The services that it names with the label `job`."""
        return {
            job
            for label, operator, value in self.matchers
            if label == "job" and operator in ("=", "=~")
            for job in value.split("|")
        }


def selectors(expr: str) -> list[Selector]:
    """Every selector of an expression, in order."""
    tokens = [
        (match.lastgroup or "", match.group(match.lastgroup or 0))
        for match in _TOKEN.finditer(expr.strip())
    ]
    found = []
    in_label_list = False
    for i, (kind, text) in enumerate(tokens):
        following = tokens[i + 1] if i + 1 < len(tokens) else ("", "")
        if in_label_list:
            in_label_list = text != ")"
        elif kind == "name" and text in _LABEL_LISTS:
            in_label_list = following[1] == "("
        elif kind == "name" and not (
            text in _WORDS or text in _AGGREGATIONS or following[1] == "("
        ):
            matchers = _MATCHER.findall(following[1]) if following[0] == "matchers" else []
            found.append(Selector(text, tuple(matchers)))
    return found


def dashboards() -> list[dict[str, Any]]:
    """All dashboards."""
    return [json.loads(path.read_text()) for path in DASHBOARDS]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Its panels without the rows between them."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_queries() -> list[Query]:
    """What all panels ask."""
    return [
        Query(f"{dashboard['title']}: {panel['title']}: {target['refId']}", target["expr"])
        for dashboard in dashboards()
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def rules(file: str) -> Iterator[dict[str, Any]]:
    """The rules of `rules.yml` or `alerts.yml`."""
    for group in yaml.safe_load((PROMETHEUS / file).read_text())["groups"]:
        yield from group["rules"]


def recordings() -> set[str]:
    """Names of the series that rules record."""
    return {rule["record"] for rule in rules("rules.yml")}


def rule_queries() -> list[Query]:
    """What all rules and alerts ask."""
    return [
        Query(f"{file}: {rule.get('record') or rule['alert']}", rule["expr"])
        for file in ("rules.yml", "alerts.yml")
        for rule in rules(file)
    ]

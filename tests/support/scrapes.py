"""Scrapes: a service's metrics over HTTP, or out of its registry, as plain numbers."""

from __future__ import annotations

import asyncio
import math
import urllib.request
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """All samples of one moment."""

    def __init__(self, text: str) -> None:
        self.size = len(text)
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self.counters: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        """Those that may never fall."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.samples, f"{key} is there twice"
                self.samples[key] = sample.value
                if family.type in ("counter", "histogram"):
                    self.counters.add(key)

    def __call__(self, name: str, **labels: str) -> float:
        """The value of `outrider_<name>` with exactly these labels; KeyError if there is none."""
        return self.samples[f"outrider_{name}", frozenset(labels.items())]

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of `outrider_<name>` by that label."""
        return {
            dict(labels)[label]: value
            for (each, labels), value in self.samples.items()
            if each == f"outrider_{name}"
        }

    def has(self, name: str) -> bool:
        """There is such a series."""
        return any(each == f"outrider_{name}" for each, _ in self.samples)

    def check_numbers(self, before: Scrape | None = None) -> None:
        """All numbers are numbers, none is negative, and no counter has fallen since `before`."""
        wrong = {
            key: value
            for key, value in self.samples.items()
            if not math.isfinite(value) or value < 0
        }
        assert not wrong
        if before is not None:
            earlier: Mapping[object, float] = before.samples
            fallen = {
                key: (earlier[key], self.samples.get(key))
                for key in before.counters
                if self.samples.get(key, -1.0) < earlier[key]
            }
            assert not fallen


def scrape_registry(registry: CollectorRegistry) -> Scrape:
    """What a scrape would show now."""
    return Scrape(generate_latest(registry).decode())


async def scrape(port: int) -> Scrape:
    """What the service on this machine shows over HTTP."""
    return Scrape(await scrape_text(port))


async def scrape_text(port: int) -> str:
    """The same, as it stands."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode()

    return await asyncio.to_thread(get)

"""What the metrics of all services share: a registry each, its process metrics, and buckets.

A service counts in its own objects. What it counts already is read at a scrape by a `Snapshot`,
which runs on the event loop: no other code runs in between, so sums add up in every scrape. Only
distributions are observed as they happen, in histograms of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.serving.tracing import Tracing
from outrider.serving.version import VERSION

# A time of creation beside each counter and histogram would add a third to every scrape.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
TOKENS_BUCKETS = tuple(float(2**n) for n in range(14))


def counter(name: str, text: str, value: float) -> Metric:
    """The counter `outrider_<name>_total` as a snapshot shows it."""
    return CounterMetricFamily(f"outrider_{name}", text, value)


def gauge(name: str, text: str, value: float) -> Metric:
    """The gauge `outrider_<name>`."""
    return GaugeMetricFamily(f"outrider_{name}", text, value)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """One counter by the values of a label, which must be few and known beforehand."""
    return _filled(CounterMetricFamily(f"outrider_{name}", text, labels=[label]), values)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """One gauge by the values of a label, which must be few and known beforehand."""
    return _filled(GaugeMetricFamily(f"outrider_{name}", text, labels=[label]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class Snapshot(Collector):
    """Families that a function makes anew at every scrape, from what is true at that moment."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """All of them, made before the first is written."""
        return list(self._families())


def make_registry(service: str, tracing: Tracing) -> CollectorRegistry:
    """A registry with what every service shows: its version, its process, its lost spans."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(Snapshot(lambda: _common(service, tracing)))
    return registry


def _common(service: str, tracing: Tracing) -> Iterable[Metric]:
    build = GaugeMetricFamily(
        "outrider_build_info",
        "Always 1; the labels say what this is.",
        labels=["version", "service"],
    )
    build.add_metric([VERSION, service], 1)
    yield build
    yield counter("spans_dropped", "Spans that never reached a collector.", tracing.spans_dropped)

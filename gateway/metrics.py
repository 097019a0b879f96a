"""The gateway's metrics: requests by how they ended, tokens by what became of them, and times.

Counts are plain numbers, read all at once at a scrape: requests started are those that ended and
those that run; tokens generated are those delivered, withheld and held. Labels have values from
fixed sets only, so no client can add a series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric

from gateway.caller import DOORS, Door
from gateway.ending import Code, Ending, Outcome
from gateway.http_totals import HttpTotals
from outrider.serving.faults import Faults
from outrider.serving.metrics import SECONDS_BUCKETS, Snapshot, counter, counters, gauge, gauges

FINISH_REASONS = ("stop", "length")
_ERRORS = [code for code in Code if code not in (Code.OK, Code.CANCELLED)]


@dataclass(slots=True)
class Totals:
    """Since the start."""

    started_by_door: dict[Door, int] = field(default_factory=lambda: dict.fromkeys(DOORS, 0))
    ended: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    by_code: dict[Code, int] = field(default_factory=lambda: dict.fromkeys(_ERRORS, 0))
    by_reason: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    prompt_tokens: int = 0
    """Of requests that a target has begun to answer."""
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    """That came from targets."""
    delivered_tokens: int = 0
    withheld_tokens: int = 0
    """Generated, and of no use to the client: behind a stop string, or it had left."""
    http: HttpTotals = field(default_factory=HttpTotals)

    @property
    def started(self) -> int:
        """Requests that arrived, by whatever door."""
        return sum(self.started_by_door.values())

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return self.started - sum(self.ended.values())

    @property
    def held_tokens(self) -> int:
        """Tokens whose messages wait for their clients now."""
        return self.generated_tokens - self.delivered_tokens - self.withheld_tokens


class GatewayMetrics:
    """Told by the records of requests."""

    def __init__(self, registry: CollectorRegistry, targets: Callable[[], dict[str, int]]) -> None:
        """targets: how many are in each state now."""
        self.totals = Totals()
        self.faults = Faults()
        self._targets = targets

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"outrider_{name}_seconds", text, buckets=SECONDS_BUCKETS, registry=registry
            )

        self.time_to_first_token = seconds(
            "time_to_first_token", "From a request's arrival to the first message with a token."
        )
        self.time_per_output_token = seconds(
            "time_per_output_token",
            "Between the tokens of a choice on average, the first one left out; finished requests.",
        )
        self.request_duration = seconds(
            "request_duration",
            "From a request's arrival to its end, however it ended, but for refused ones.",
        )
        registry.register(Snapshot(self._families))

    def started(self, door: Door) -> None:
        """A request has arrived there."""
        self.totals.started_by_door[door] += 1

    def ended(self, ending: Ending, finish_reason: str) -> None:
        """A request has; `finish_reason` only counts for one that finished."""
        self.totals.ended[ending.outcome] += 1
        if ending.outcome is Outcome.FINISHED:
            self.totals.by_reason[finish_reason] += 1
        elif ending.outcome is not Outcome.CANCELLED:
            self.totals.by_code[ending.code] += 1

    def _families(self) -> Iterator[Metric]:
        totals = self.totals
        yield counter("requests_started", "Requests that arrived.", totals.started)
        yield counters(
            "requests_started_by_door",
            "Requests that arrived, by where they came in.",
            "door",
            {door: count for door, count in totals.started_by_door.items()},
        )
        yield counters(
            "requests",
            "Requests that ended, by how.",
            "outcome",
            {outcome.value: count for outcome, count in totals.ended.items()},
        )
        yield gauge("requests_running", "Requests that have not ended.", totals.running)
        yield counters(
            "requests_failed_by_code",
            "Requests that ended with an error, failed and refused ones, by gRPC's code for it.",
            "code",
            {code.name.lower(): count for code, count in totals.by_code.items()},
        )
        yield counters(
            "requests_finished_by_reason",
            "Finished requests: length if any of their choices was cut off, stop if none was.",
            "reason",
            totals.by_reason,
        )
        yield counters(
            "tokens",
            "Tokens of prompts and answers, by what became of them.",
            "kind",
            {
                "prompt": totals.prompt_tokens,
                "cached_prompt": totals.cached_prompt_tokens,
                "generated": totals.generated_tokens,
                "delivered": totals.delivered_tokens,
                "withheld": totals.withheld_tokens,
            },
        )
        yield gauge("tokens_held", "Tokens whose messages wait for clients.", totals.held_tokens)
        yield gauges(
            "targets", "Target addresses, by whether they can be asked.", "state", self._targets()
        )
        yield from _of_http(totals.http)
        yield counter("telemetry_errors", "Errors of logs, traces and metrics.", self.faults.count)


def _of_http(totals: HttpTotals) -> Iterator[Metric]:
    yield counters(
        "http_answers",
        "Answers of the HTTP port to whatever came, by the class of their status.",
        "status",
        totals.answers,
    )
    yield counters(
        "http_connections",
        "Connections to the HTTP port, by how far they got: established is behind TLS's handshake.",
        "stage",
        {"accepted": totals.accepted, "established": totals.established},
    )
    yield gauge("http_connections_open", "Connections over HTTP that are open.", totals.open)

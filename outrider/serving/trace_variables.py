"""The standard OTEL_ variables, read here because a value that cannot be followed is an error.

OpenTelemetry's own readers go on with something else and say so in the log, if at all. An empty
variable is as good as none. What is raised is a ValueError that names the variable.
"""

from __future__ import annotations

import math
import os
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.sdk.trace import sampling

DEFAULT_ENDPOINT = "http://localhost:4317"
MAX_SPANS = 2048
"""Ended spans that may wait; the variable OTEL_BSP_MAX_QUEUE_SIZE says another number."""
_BATCH = 512
_EVERY_MS = 5_000
_TIMEOUT_S = 10.0

_OTLP = "OTEL_EXPORTER_OTLP"
_SAMPLERS: dict[str, sampling.Sampler] = {
    "always_on": sampling.ALWAYS_ON,
    "always_off": sampling.ALWAYS_OFF,
    "parentbased_always_on": sampling.DEFAULT_ON,
    "parentbased_always_off": sampling.DEFAULT_OFF,
}
_SHARES = {
    "traceidratio": sampling.TraceIdRatioBased,
    "parentbased_traceidratio": sampling.ParentBasedTraceIdRatio,
}
_COMPRESSIONS = {
    "": grpc.Compression.NoCompression,
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
}


def variable(*names: str) -> str:
    """The first of them that is set; empty for none."""
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


def endpoint() -> str:
    """Where the collector is; empty if none is named."""
    return variable(f"{_OTLP}_TRACES_ENDPOINT", f"{_OTLP}_ENDPOINT")


def exporter_arguments() -> dict[str, Any]:
    """For an OTLP exporter. Its headers and files it reads itself: they are only looked at."""
    for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        _check_file(f"{_OTLP}_{name}")
        _check_file(f"{_OTLP}_TRACES_{name}")
    return {
        "endpoint": _checked_endpoint(endpoint() or DEFAULT_ENDPOINT),
        "timeout": _timeout_s(),
        "compression": _compression(),
    }


def batch_arguments() -> dict[str, Any]:
    """For a batch processor."""
    max_spans = _whole_number("OTEL_BSP_MAX_QUEUE_SIZE", MAX_SPANS)
    batch = _whole_number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(_BATCH, max_spans))
    if batch > max_spans:
        raise ValueError(
            f"OTEL_BSP_MAX_EXPORT_BATCH_SIZE must be at most the {max_spans} spans of "
            f"OTEL_BSP_MAX_QUEUE_SIZE, got {batch}"
        )
    return {
        "max_queue_size": max_spans,
        "max_export_batch_size": batch,
        "schedule_delay_millis": _whole_number("OTEL_BSP_SCHEDULE_DELAY", _EVERY_MS),
    }


def sampler() -> sampling.Sampler:
    """What share of the traces is recorded."""
    name = variable("OTEL_TRACES_SAMPLER").lower() or "parentbased_always_on"
    if name in _SAMPLERS:
        return _SAMPLERS[name]
    if name not in _SHARES:
        known = ", ".join([*_SAMPLERS, *_SHARES])
        raise ValueError(f"OTEL_TRACES_SAMPLER must be one of {known}, got {name!r}")
    given = variable("OTEL_TRACES_SAMPLER_ARG") or "1"
    share = _number(given)
    if not 0 <= share <= 1:
        raise ValueError(f"OTEL_TRACES_SAMPLER_ARG must be a number from 0 to 1, got {given!r}")
    return _SHARES[name](share)


def _checked_endpoint(given: str) -> str:
    try:
        parts = urlsplit(given)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port, or of half an IPv6 address
        good = False
    if not good:
        raise ValueError(
            f"{_OTLP}_ENDPOINT must begin with http:// or https:// and name a host, got {given!r}"
        )
    return given


def _timeout_s() -> float:
    given = variable(f"{_OTLP}_TRACES_TIMEOUT", f"{_OTLP}_TIMEOUT")
    seconds = _number(given) if given else _TIMEOUT_S
    if not 0 < seconds < math.inf:
        raise ValueError(f"{_OTLP}_TIMEOUT must be a number of seconds above 0, got {given!r}")
    return seconds


def _compression() -> grpc.Compression:
    given = variable(f"{_OTLP}_TRACES_COMPRESSION", f"{_OTLP}_COMPRESSION").lower()
    if given not in _COMPRESSIONS:
        raise ValueError(f"{_OTLP}_COMPRESSION must be gzip or none, got {given!r}")
    return _COMPRESSIONS[given]


def _check_file(name: str) -> None:
    path = variable(name)
    if path:
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ValueError(f"{name}: cannot read {path!r}: {error.strerror}") from error


def _number(text: str) -> float:
    """NaN, which is in no range, for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _whole_number(name: str, default: int) -> int:
    given = variable(name)
    if not given:
        return default
    if not given.isdecimal() or len(given) > 9 or not int(given):
        raise ValueError(f"{name} must be a whole number above 0, got {given!r}")
    return int(given)

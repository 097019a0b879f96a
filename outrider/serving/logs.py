"""Logging: readable lines on a terminal, JSON everywhere else, always on standard error.

What is logged through the standard library comes out in the same shape: of libraries only warnings
and errors, of our own parts that know no structlog, such as the engine, all that the level admits.
What is said of a collector of traces, by whomever, is one line a minute: one that is away would
fill the log, and it is the least important of all that can be away.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, Processor

from outrider.text import indented, one_line

_OURS = ("outrider", "outrider_kernels")
_OF_COLLECTORS = ("opentelemetry", "outrider.serving.span_export")
_OF_COLLECTORS_EVERY_S = 60.0
_GONE = "ExecuteBatchError raised in core"
"""How grpc calls it an error that a client has gone in the middle of a write to it. The request's
own line says that it has."""


class _Unfailing:
    """Standard error: that nobody takes what is written there ends no request and no step."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.flush()


class _Foreign(logging.Handler):
    """Passes on what is said through the standard library."""

    def __init__(self) -> None:
        super().__init__()
        self._next_of_collectors = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """One line, or none."""
        if record.name.startswith(_OF_COLLECTORS):
            if time.monotonic() < self._next_of_collectors:
                return
            self._next_of_collectors = time.monotonic() + _OF_COLLECTORS_EVERY_S
        of_grpc, message = record.name.startswith("grpc"), record.getMessage()
        if of_grpc and message.startswith(_GONE):
            return
        # grpc shows tracebacks of what it has logged an error for.
        shown = None if of_grpc else record.exc_info
        log = structlog.get_logger(record.name)
        log.log(record.levelno, message, logger=record.name, exc_info=shown)


def configure_logging(service: str, level: str = "info") -> None:
    """Set structlog up once, at the start of a process. Raises ValueError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}")
    terminal = sys.stderr is not None and sys.stderr.isatty()  # none where it was closed

    def name_service(_: Any, __: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)  # on every thread, unlike a context variable
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_service,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *(_for_terminals() if terminal else _for_programs()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Unfailing(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    # What a client sends as the context of its trace is no news, nor is that it is malformed.
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
    logging.basicConfig(handlers=[_Foreign()], level=logging.WARNING, force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(number)


def _for_programs() -> list[Processor]:
    return [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=str),
    ]


def _for_terminals() -> list[Processor]:
    # structlog's own traceback shows every variable and holds the event loop for half a second.
    return [_as_lines, structlog.dev.ConsoleRenderer(exception_formatter=_show_traceback)]


def _as_lines(_: Any, __: str, event: EventDict) -> EventDict:
    """Values that the renderer would show as they are, be they control characters."""
    for key, value in event.items():
        if key != "exc_info":
            text = value if isinstance(value, str) else repr(value)
            if one_line(text) != text:
                event[key] = one_line(text)
    return event


def _show_traceback(file: TextIO, error: ExcInfo) -> None:
    file.write("\n" + indented("".join(traceback.format_exception(*error)).rstrip("\n")))

"""Errors of logs, traces and metrics: counted, said once, and never let out to what they watch."""

from __future__ import annotations

from types import TracebackType

import structlog

log = structlog.get_logger(__name__)


class Faults:
    """All of one service. `with faults:` lets none of them out."""

    def __init__(self) -> None:
        self.count = 0
        self._said: set[str] = set()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None or traceback is None or not isinstance(error, Exception):
            return False
        self.count += 1
        where = traceback.tb_frame.f_code.co_name
        if where not in self._said:  # not once a request
            self._said.add(where)
            log.error("telemetry failed", where=where, exc_info=error)
        return True

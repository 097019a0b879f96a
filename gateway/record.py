"""One log line a request, written when it ends however it ends. Never holds text."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

import structlog

from outrider.params import InvalidParam
from outrider.serving.errors import InvalidRequest, OutriderError
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import sampling_pb2

log = structlog.get_logger(__name__)

_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


class RequestRecord:
    """Collects what the line says; a context manager around the whole request."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._fields: dict[str, object] = {}
        self._num_tokens = 0
        self._outcome: str | None = None

    def checked(self, request_id: str, seed: int) -> None:
        """The request's values are in their limits."""
        self._fields.update(request_id=request_id, seed=seed)

    def routed(self, target: str, num_prompt_tokens: int) -> None:
        """A target was chosen."""
        self._fields.update(target=target, prompt_tokens=num_prompt_tokens)

    def sending(self, response: pb.GenerateResponse) -> None:
        """A message is about to go to the client."""
        if response.HasField("finish"):
            finish = response.finish
            self._outcome = _REASONS.get(finish.reason, "unknown")
            self._fields.update(
                drafted=finish.speculation.drafted, accepted=finish.speculation.accepted
            )
        elif response.chunk.tokens:
            self._num_tokens += len(response.chunk.tokens)
            if self._first_token_s is None:
                self._first_token_s = time.perf_counter() - self._started_s

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._outcome is None:
            self.failed(error)
        first = self._first_token_s
        log.info(
            "request",
            outcome=self._outcome,
            completion_tokens=self._num_tokens,
            time_to_first_token_s=None if first is None else round(first, 4),
            duration_s=round(time.perf_counter() - self._started_s, 4),
            **self._fields,
        )

    def failed(self, error: BaseException) -> None:
        """The request ends with this, unless something else is told before the end."""
        # The generator is closed or its task cancelled when the client has gone.
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._outcome = "cancelled"
            return
        self._outcome = "error"
        if isinstance(error, InvalidRequest | InvalidParam):
            self._fields.update(code=InvalidRequest.code.name, field=error.field)
        elif isinstance(error, OutriderError):
            self._fields.update(code=error.code.name, error=str(error))
        else:
            self._fields.update(error=type(error).__name__)

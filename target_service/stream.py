"""The bounded hand-over of tokens from the batcher to the call that delivers them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from outrider.serving.errors import Unavailable
from target_service.request import Piece


class TokenStream:
    """One writer, one reader. Never blocks the writer: it is `full` and the request then pauses.

    A reader that takes nothing for `stall_s` while the stream is full loses it, if `on_stall` says
    that there was something left to end.
    """

    def __init__(
        self,
        max_tokens: int,
        stall_s: float,
        on_drained: Callable[[], None],
        on_stall: Callable[[], bool],
    ) -> None:
        self.full = False
        self._max_tokens = max_tokens
        self._stall_s = stall_s
        self._on_drained, self._on_stall = on_drained, on_stall
        self._pieces: deque[Piece] = deque()
        self._num_tokens = 0
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._stall_timer: asyncio.TimerHandle | None = None

    def put(self, piece: Piece) -> None:
        """Add the tokens of a round."""
        self._pieces.append(piece)
        self._num_tokens += len(piece.tokens) + len(piece.prompt)
        self._ready.set()
        if self._num_tokens >= self._max_tokens and not self.full:
            self.full = True
            self._restart_stall_timer()

    def fail(self, error: Exception) -> None:
        """End with an error, behind the tokens that are already here."""
        self._error = error
        self._ready.set()

    async def get(self) -> Piece:
        """The next piece, in order; raises the error that ended the stream behind the last one."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        piece = self._pieces.popleft()
        self._num_tokens -= len(piece.tokens) + len(piece.prompt)
        # It goes on when it is half empty, so that a slow reader does not stop it at every token.
        if self.full and self._num_tokens <= self._max_tokens // 2:
            self.full = False
            self.close()
            self._on_drained()
        elif self._stall_timer is not None:
            self._restart_stall_timer()
        return piece

    def close(self) -> None:
        """Stop watching for a stalled reader."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _restart_stall_timer(self) -> None:
        self.close()
        self._stall_timer = asyncio.get_running_loop().call_later(self._stall_s, self._stall)

    def _stall(self) -> None:
        if self._on_stall():  # else everything is made already, and waits for its reader
            self._pieces.clear()
            self.fail(Unavailable(f"the stream was not read for {self._stall_s:g} s"))

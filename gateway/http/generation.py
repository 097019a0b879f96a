"""The two ways over HTTP to ask for text: a body in OpenAI's words in, events or one answer out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from starlette.types import Receive

from gateway.http.body import Bodies
from gateway.http.caller import HttpCaller
from gateway.http.reply import Reply
from gateway.http.to_answer import About, ChatAnswer, CompletionAnswer
from gateway.http.to_request import ParsedRequest
from gateway.inference import Inference
from gateway.lane import Lane
from outrider.params import InvalidParam
from outrider.serving.errors import DeadlinePassed, OutriderError

_QUICK_BYTES = 16 * 1024
"""Up to this size a body is understood in a few milliseconds; one of four megabytes takes a second.
"""


class Generation:
    """One of the two."""

    def __init__(
        self,
        inference: Inference,
        bodies: Bodies,
        large: Lane,
        parse: Callable[[bytes], ParsedRequest],
        answer: type[ChatAnswer] | type[CompletionAnswer],
    ) -> None:
        """large: where large bodies are understood."""
        self._inference = inference
        self._bodies = bodies
        self._large = large
        self._parse = parse
        self._answer = answer

    async def __call__(self, caller: HttpCaller, receive: Receive, reply: Reply) -> None:
        """Raises OutriderError and InvalidParam, also when the answer has begun."""
        try:
            parsed = await self._read(caller, receive)
        except (OutriderError, InvalidParam) as error:
            await self._refuse(error, caller)
            return
        model = self._inference.model
        about = About(caller.request_id, model.name, model.tokenizer, int(time.time()))
        answer = self._answer(parsed, about)
        responses = self._inference.generate(parsed.request, caller, parsed.default_max_tokens)
        async with _in_time(caller), contextlib.aclosing(responses):
            if not parsed.stream:
                async for response in responses:
                    answer.take(response)
                await reply.whole(200, {"content-type": "application/json"}, answer.whole())
                return
            async for response in responses:
                try:
                    await reply.events(answer.chunks(response))
                except BaseException as error:
                    # The core must know why it ends: closed alone, it would say for a shutdown.
                    await responses.athrow(error)
                    raise
            await reply.end_events(answer.final())

    async def _read(self, caller: HttpCaller, receive: Receive) -> ParsedRequest:
        """Whoever is refused whatever the body says is so before it is read."""
        error = self._inference.refuse_early(caller) or caller.invalid
        if error is not None:
            raise error
        async with _in_time(caller), self._bodies.read(caller, receive) as body:
            if len(body) <= _QUICK_BYTES:
                parsed = self._parse(body)
            else:
                parsed = await self._large.run(len(body), lambda: self._parse(body))
        parsed.request.request_id = caller.request_id
        return parsed

    async def _refuse(self, error: OutriderError | InvalidParam, caller: HttpCaller) -> None:
        """Through the core, which keeps account of every request, and raises it again."""
        async for _ in self._inference.generate(error, caller):
            pass


@contextlib.asynccontextmanager
async def _in_time(caller: HttpCaller) -> AsyncIterator[None]:
    """Raises DeadlinePassed when the client's own deadline passes."""
    try:
        async with asyncio.timeout(caller.time_remaining()):
            yield
    except TimeoutError:
        raise DeadlinePassed("the time that X-Request-Timeout gives is over") from None

"""What the HTTP port answers: OpenAI's paths, two probes, and the document of them all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from gateway.http.body import Bodies
from gateway.http.caller import HttpCaller
from gateway.http.connection import MAX_HEAD_BYTES
from gateway.http.generation import Generation
from gateway.http.json_out import to_json
from gateway.http.models import model_entry, model_list
from gateway.http.openapi import openapi_document
from gateway.http.refusals import HttpRefusal
from gateway.http.reply import Reply
from gateway.http.to_answer import ChatAnswer, CompletionAnswer
from gateway.http.to_request import parse_chat, parse_completion
from gateway.inference import Inference
from gateway.lane import Lane
from outrider.params import InvalidParam
from outrider.serving.errors import EngineFailed, OutriderError, Unavailable
from outrider.serving.health import Health
from outrider.serving.open_calls import SHUTTING_DOWN, OpenCalls

log = structlog.get_logger(__name__)

_CALLER, _REPLY = "outrider.caller", "outrider.reply"
_JSON = {"content-type": "application/json"}
_PLAIN = {"content-type": "text/plain; charset=utf-8"}

_Handler = Callable[[HttpCaller, Receive, Reply], Awaitable[None]]


class HttpApp:
    """An ASGI application for `Connection`s."""

    def __init__(
        self,
        inference: Inference,
        health: Health,
        calls: OpenCalls,
        *,
        max_body_bytes: int,
        stall_s: float,
    ) -> None:
        """stall_s: after which a client that does not read loses its connection."""
        self._inference = inference
        self._health = health
        self._calls = calls
        self._stall_s = stall_s
        self._started_s = int(time.time())
        self._document = to_json(openapi_document())
        bodies = Bodies(max_body_bytes)
        self._large_bodies = large = Lane("json")  # as many wait as `bodies` lets in
        chat = Generation(inference, bodies, large, parse_chat, ChatAnswer)
        completion = Generation(inference, bodies, large, parse_completion, CompletionAnswer)
        routes = [
            _route("POST", "/v1/chat/completions", chat),
            _route("POST", "/v1/completions", completion),
            _route("GET", "/v1/models", self._models),
            _route("GET", "/v1/models/{model:path}", self._model),
            _route("GET", "/healthz", self._alive),
            _route("GET", "/readyz", self._ready),
            _route("GET", "/openapi.json", self._openapi),
        ]
        self._router = Router(routes, redirect_slashes=False, default=_not_found)

    def close(self) -> None:
        """Let the thread go."""
        self._large_bodies.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Every error becomes its answer here, and nothing is raised."""
        # A pipelined request begins in the context of the one before it.
        structlog.contextvars.clear_contextvars()
        caller = HttpCaller(scope, self._stall_s)
        reply = Reply(caller, send)
        # With an "app" the router raises for a wrong method, and answers nothing of its own.
        scope.update({"app": self, _CALLER: caller, _REPLY: reply})
        try:
            with self._calls.track(), caller.watched():
                await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            if not caller.left:
                raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: HttpCaller = scope[_CALLER]
        reply: Reply = scope[_REPLY]
        try:
            _check_head(scope)
            await self._router(scope, receive, send)
        except asyncio.CancelledError:
            if caller.left or not self._calls.ending:
                raise
            await reply.error(Unavailable(SHUTTING_DOWN))
        except HTTPException as error:  # the router's
            await reply.error(HttpRefusal(error.status_code, _wrong_method(scope), error.headers))
        except (OutriderError, InvalidParam) as error:
            await reply.error(error)
        except Exception as error:
            log.error("unexpected error in a handler", route=caller.route, exc_info=error)
            await reply.error(EngineFailed(f"internal error ({type(error).__name__})"))

    async def _models(self, caller: HttpCaller, receive: Receive, reply: Reply) -> None:
        models = self._inference.list_models(caller)
        await reply.whole(200, _JSON, to_json(model_list(models, self._started_s)))

    async def _model(self, caller: HttpCaller, receive: Receive, reply: Reply) -> None:
        name = caller.parameters["model"]
        for model in self._inference.list_models(caller).models:
            if model.name == name:
                await reply.whole(200, _JSON, to_json(model_entry(model, self._started_s)))
                return
        raise self._inference.not_served(name)

    async def _alive(self, caller: HttpCaller, receive: Receive, reply: Reply) -> None:
        await self._say(reply, self._health.alive)

    async def _ready(self, caller: HttpCaller, receive: Receive, reply: Reply) -> None:
        await self._say(reply, self._health.ready)

    async def _say(self, reply: Reply, good: bool) -> None:
        state = f"{self._health.state}\n".encode()
        await reply.whole(200 if good else 503, _PLAIN, state)

    async def _openapi(self, caller: HttpCaller, receive: Receive, reply: Reply) -> None:
        await reply.whole(200, _JSON, self._document)


class _Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, path: str, handler: _Handler) -> None:
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: HttpCaller = scope[_CALLER]
        caller.found(self._path, scope["path_params"])
        await self._handler(caller, receive, scope[_REPLY])


def _route(method: str, path: str, handler: _Handler) -> Route:
    return Route(path, _Endpoint(path, handler), methods=[method])


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HttpRefusal(404, f"there is no {scope['path'][:80]!r} here")


def _wrong_method(scope: Scope) -> str:
    return f"{scope['path'][:80]!r} does not take {scope['method'][:20]!r}"


def _check_head(scope: Scope) -> None:
    """h11 limits what comes piece by piece, not to the byte, and is lenient."""
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if num_bytes > MAX_HEAD_BYTES:
        raise HttpRefusal(431, f"the headers may have {MAX_HEAD_BYTES} bytes, got {num_bytes}")
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        # A proxy that goes by the length takes the rest of the body for another client's request.
        raise HttpRefusal(
            400, "Content-Length and Transfer-Encoding exclude each other", {"connection": "close"}
        )

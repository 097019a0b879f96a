"""uvicorn as services use it for HTTP: a protocol on their own event loop, and nothing else."""

from __future__ import annotations

from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


def http_config(app: Any, protocol: type[H11Protocol], **more: Any) -> uvicorn.Config:
    """For connections of the class `protocol`, answered by the ASGI application `app`.

    more: other fields of uvicorn's Config.
    """
    return uvicorn.Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",  # who sends what is no HTTP is no news
        access_log=False,
        server_header=False,
        **more,
    )

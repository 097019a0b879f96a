"""A client for people's own programs: `async with Client("host:50051") as client:`."""

from outrider.client.answers import Answer, Choice, Chunk, Finish, Model, PromptToken, Token, Tokens
from outrider.client.client import Client
from outrider.client.errors import CallFailed
from outrider.client.retries import Retries
from outrider.client.stream import Stream
from outrider.client.wire import Settings
from outrider.serving.errors import (
    DeadlinePassed,
    EngineFailed,
    Incompatible,
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from outrider.serving.tls import ClientTls

__all__ = [
    "Answer",
    "CallFailed",
    "Choice",
    "Chunk",
    "Client",
    "ClientTls",
    "DeadlinePassed",
    "EngineFailed",
    "Finish",
    "Incompatible",
    "InvalidRequest",
    "Model",
    "NotFound",
    "OutriderError",
    "Overloaded",
    "PromptToken",
    "Retries",
    "Settings",
    "Stream",
    "Token",
    "Tokens",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
]

"""What the gateway's span of a request over HTTP must say."""

from __future__ import annotations

from tests.support.http_gateway import CHAT
from tests.support.otlp import Seen

Told = tuple[str, str, str]
"""(outcome, error.type, status) of a span."""

FINISHED: Told = ("finished", "", "unset")
CANCELLED: Told = ("cancelled", "cancelled", "unset")


def refused(code: str) -> Told:
    """At the door."""
    return "refused", code, "error"


def failed(code: str) -> Told:
    """Later."""
    return "failed", code, "error"


def told(span: Seen) -> Told:
    """What a span says of how its request ended; an error comes with its reason."""
    assert (span.status == "error") == bool(span.status_message)
    return span.attributes["outrider.outcome"], span.attributes.get("error.type", ""), span.status


def assert_of_http(span: Seen, status: int | None, path: str = CHAT) -> None:
    """In the words of the conventions for HTTP. status: None if the client left before it."""
    attributes = span.attributes
    assert span.kind == "server"
    assert attributes.get("http.response.status_code") == status
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == attributes["url.path"] == path
    assert attributes["url.scheme"] == "http"
    assert len(attributes["outrider.request_id"]) == 32
    assert not [name for name in attributes if name.startswith("rpc.")]

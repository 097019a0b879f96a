"""What the spans of a request must say of its end, whichever door it came through."""

from __future__ import annotations

from tests.support.http_gateway import CHAT
from tests.support.otlp import Seen
from tests.support.token_streams import quiet_status
from tests.support.traced_stack import TracedStack, chain_under

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


async def assert_ends(
    stack: TracedStack, gateway: Told, target: Told | None, draft: str | None
) -> Seen:
    """One span a service, soon, with the right end, for the one request not called "first".

    None that was started and has not ended. draft: the outcome; None where it does not matter.
    Returns the gateway's span.
    """
    await quiet_status(stack.target)
    await stack.wait_ended()
    seen = stack.spans.of("gateway")
    (span,) = (each for each in seen if each.attributes.get("outrider.request_id") != "first")
    chain = chain_under(stack.spans, span)
    assert told(span) == gateway
    assert (told(chain.target) if chain.target else None) == target
    if draft is not None:
        assert chain.draft.attributes["outrider.outcome"] == draft
    assert stack.gateway.service._metrics.totals.started == len(seen)
    return span


def assert_of_http(span: Seen, status: int | None, path: str = CHAT) -> None:
    """The gateway's, in the words of the conventions for HTTP.

    status: None if the client left before it.
    """
    attributes = span.attributes
    assert span.kind == "server"
    assert attributes.get("http.response.status_code") == status
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == attributes["url.path"] == path
    assert attributes["url.scheme"] == "http"
    assert len(attributes["outrider.request_id"]) == 32
    assert not [name for name in attributes if name.startswith("rpc.")]

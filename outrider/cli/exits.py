"""Exit statuses of the commands that ask a gateway, and of the command line as a whole."""

from __future__ import annotations

import signal

import click
import grpc

from outrider.serving.refusals import NOT_CONNECTED, explain_refusal
from outrider.serving.tls import ClientTls
from outrider.text import one_line

ANSWERED, FAILED, USAGE, NO_GATEWAY, REFUSED, BUSY, OUT_OF_TIME = range(7)
INTERRUPTED = 128 + signal.SIGINT
BY_CODE = {
    grpc.StatusCode.UNAVAILABLE: NO_GATEWAY,
    grpc.StatusCode.UNIMPLEMENTED: NO_GATEWAY,
    grpc.StatusCode.INVALID_ARGUMENT: REFUSED,
    grpc.StatusCode.NOT_FOUND: REFUSED,
    grpc.StatusCode.UNAUTHENTICATED: REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BUSY,
    grpc.StatusCode.DEADLINE_EXCEEDED: OUT_OF_TIME,
}
_CLOCK_S = 0.05
"""What two clocks may differ by: either end of a call may be the first to notice."""
EXIT_HELP = (
    "Exit status: 0 answered; 1 anything else went wrong; 2 wrong usage or settings; 3 no gateway "
    "or no target there; 4 the request was refused; 5 too busy; 6 out of time; 130 interrupted."
)


def report(
    error: grpc.RpcError,
    address: str,
    timeout_s: float,
    waited_s: float,
    tls: ClientTls | None = None,
) -> int:
    """Say what failed; the exit status of it. tls: what the call used."""
    code, details = error.code(), error.details() or ""
    if refusal := explain_refusal(details, tls):
        message = f"no answer from a gateway at {address}: {refusal}"
    elif code is grpc.StatusCode.UNAVAILABLE and details.startswith(NOT_CONNECTED):
        message = f"no answer from a gateway at {address}; is `outrider up` running?"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED and waited_s > timeout_s - _CLOCK_S:
        message = f"out of time after {timeout_s:g} s (--timeout)"
    elif code is grpc.StatusCode.UNAVAILABLE:
        message = f"no answer from a gateway at {address}: {details}"
    elif code is grpc.StatusCode.UNIMPLEMENTED:
        message = f"what answers at {address} is no gateway: {details}"
    else:
        message = f"{code.name}: {details}"
        if code is grpc.StatusCode.UNAUTHENTICATED:  # what to send is said for other programs
            message += "; here by OUTRIDER_API_KEY or --api-key"
    click.echo(f"Error: {one_line(message)}", err=True)
    return BY_CODE.get(code, FAILED)

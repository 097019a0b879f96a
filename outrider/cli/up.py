"""`outrider up`: gateway, target and draft on this machine, until Ctrl-C."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import threading
import time
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import click

from outrider.cli.log_lines import readable
from outrider.cli.options import build, is_given, stack_options
from outrider.cli.ports import why_not
from outrider.cli.stack import Child, Stack, StackError
from outrider.cli.watch import HealthWatch
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings

COLOURS = {"gateway": "cyan", "target": "green", "draft": "yellow"}
RESTART_AFTER_S = (1.0, 2.0, 5.0, 10.0, 30.0)
# A drafter that ran this long before it died starts again without a longer wait.
STEADY_S = 60.0


def up_options(command: Any) -> Any:
    """A decorator that gives a command everything that `outrider up` takes."""
    command = stack_options(command)
    command = click.option("--no-draft", is_flag=True, help="Run without a drafter.")(command)
    return click.option(
        "--model", default=None, help="Model name or folder, of gateway and target."
    )(command)


@click.command()
@up_options
@click.pass_context
def up(context: click.Context, /, model: str | None, no_draft: bool, **values: Any) -> None:
    """Run gateway, target and draft on this machine. Ctrl-C drains; a second one kills.

    Each is told where the next one listens, unless --gateway-targets and --target-drafters or
    their variables say something else.
    """
    settings = stack_settings(values, model, no_draft, given_addresses(context))
    for service, its in settings.items():
        if its.port == 0:
            raise click.UsageError(
                f"{service}-port must not be 0: the others have to know where it listens"
            )
        if its.tls_cert and its.metrics_port < 0:
            raise click.UsageError(
                f"{service}-metrics-port must not be -1 with {service}-tls-cert: there it says "
                "whether it serves"
            )
    stack = Stack(print_line)
    stopping = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            stack.kill()
            os._exit(128 + signum)
        stopping.set()
        # Not click.echo: the signal may have come in the middle of one.
        os.write(2, b"draining; a second signal kills\n")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        _run(stack, settings, stopping)
    except StackError as error:
        # A service that is told to stop while it starts ends, which is no failure.
        if not stopping.is_set():
            stack.stop()
            raise click.ClickException(str(error)) from error
    # A child that had not yet installed its handlers dies of the SIGTERM itself.
    bad = {name: n for name, n in stack.stop().items() if n not in (0, -signal.SIGTERM)}
    if bad:
        raise click.ClickException(f"did not end cleanly: {bad}")


def given_addresses(context: click.Context) -> list[str]:
    """Of the settings that say where the next service is, those that somebody has chosen."""
    return [name for name in ("gateway_targets", "target_drafters") if is_given(context, name)]


def stack_settings(
    values: Mapping[str, Any], model: str | None, no_draft: bool, given: Collection[str] = ()
) -> dict[str, Any]:
    """Settings of the three, with each told where the next one listens, if that is known.

    given: names of the addresses that stay as they are in `values`.
    """
    gateway = build(GatewaySettings, values, "gateway_")
    target = build(TargetSettings, values, "target_")
    draft = build(DraftSettings, values, "draft_")
    target = dataclasses.replace(target, model=model or target.model)
    gateway = dataclasses.replace(gateway, model=model or gateway.model)
    if "target_drafters" not in given and (no_draft or draft.port):
        address = "" if no_draft else f"{draft.host}:{draft.port}"
        target = dataclasses.replace(target, drafters=address)
    if "gateway_targets" not in given and target.port:
        gateway = dataclasses.replace(gateway, targets=f"{target.host}:{target.port}")
    services: dict[str, Any] = {"gateway": gateway, "target": target} | (
        {} if no_draft else {"draft": draft}
    )
    return services


def _run(stack: Stack, settings: dict[str, Any], stopping: threading.Event) -> None:
    """Until `stopping` is set. Raises StackError when a service that is needed ends."""
    refuse_taken_ports(settings)
    for service, its in settings.items():
        stack.start(service, its)
    stack.wait_healthy(settings, stopping)
    if stopping.is_set():
        return
    click.echo(f"ready: {ready_at(stack.children['gateway'])}", err=True)
    keeper = DraftKeeper(stack, settings["draft"]) if "draft" in settings else None
    watch = HealthWatch(stack, lambda line: click.echo(line, err=True))
    while not stopping.wait(0.2):
        stack.raise_if_dead(["gateway", "target"])
        watch.look()
        if keeper is not None:
            keeper.look()


def ready_at(gateway: Child) -> str:
    """Its address for gRPC, and its URL for OpenAI's API, if it has one."""
    if not gateway.http_port:
        return gateway.address
    settings = gateway.settings
    scheme = "https" if settings.tls_cert else "http"
    return f"{gateway.address} (gRPC), {scheme}://{settings.http_host}:{gateway.http_port}/v1"


def refuse_taken_ports(settings: Mapping[str, Any]) -> None:
    """Raise StackError for the first, with the flag that gives another one.

    The service itself would find out behind the load of its model.
    """
    for service, its in settings.items():
        places = {"port": (its.host, its.port)}
        places["metrics-port"] = (its.metrics_host, its.metrics_port)
        if isinstance(its, GatewaySettings):
            places["http-port"] = (its.http_host, its.http_port)
        for name, (host, port) in places.items():
            error = why_not(host, port) if port > 0 else None  # 0: any free one, -1: none
            if error is not None and error.errno == errno.EADDRINUSE:
                raise StackError(
                    f"{service} cannot listen on {host}:{port}: the port is taken; give it "
                    f"another one with --{service}-{name}"
                )


class DraftKeeper:
    """Starts the drafter again when it ends, with growing waits; the target goes on without it."""

    def __init__(self, stack: Stack, settings: DraftSettings) -> None:
        self._stack = stack
        self._settings = settings
        self._born_at = time.monotonic()
        self._deaths = 0
        self._restart_at: float | None = None

    def look(self) -> None:
        """Do what is due now."""
        child = self._stack.children["draft"]
        if child.process.poll() is None:
            return
        now = time.monotonic()
        if self._restart_at is None:
            if now - self._born_at > STEADY_S:
                self._deaths = 0
            wait_s = RESTART_AFTER_S[min(self._deaths, len(RESTART_AFTER_S) - 1)]
            self._deaths += 1
            self._restart_at = now + wait_s
            click.echo(f"{child.how_it_ended()}; a new one starts in {wait_s:g} s", err=True)
        elif now >= self._restart_at:
            self._stack.start("draft", self._settings)
            self._restart_at, self._born_at = None, now


def print_line(service: str, line: str) -> None:
    """A child's line with its name before it, JSON log lines made readable."""
    click.echo(click.style(f"{service:<8}", fg=COLOURS[service]) + readable(line), err=True)

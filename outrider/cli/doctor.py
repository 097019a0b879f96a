"""`outrider doctor`: what is here, what is wrong, and what to do about it, in words.

Exit status: 0 nothing is wrong, 1 there is a problem, 2 wrong usage or settings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import click

from outrider.cli.check_http import check_http
from outrider.cli.check_machine import check_machine
from outrider.cli.check_model import check_draft_model, check_gateway_model, check_target_model
from outrider.cli.check_services import Place, check_place, places
from outrider.cli.check_tls import check_tls
from outrider.cli.finding import Finding, Level, ok
from outrider.cli.gateway_options import credential_options
from outrider.cli.options import origin
from outrider.cli.up import given_addresses, stack_settings, up_options
from outrider.serving.tls import ClientTls
from outrider.text import counted, one_line

COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@credential_options
@up_options
@click.pass_context
def doctor(
    context: click.Context,
    /,
    as_json: bool,
    api_key: str | None,
    tls: ClientTls | None,
    model: str | None,
    no_draft: bool,
    **values: Any,
) -> None:
    """Look at this machine, the model and the services, and say what is wrong.

    Takes the flags, variables and file of `outrider up`, and looks where that puts its services.
    Exit status: 0 nothing is wrong (there may be warnings), 1 there is a problem, 2 wrong usage or
    settings.
    """
    settings = stack_settings(values, model, no_draft, given_addresses(context))
    origins = {service: origin(context, service, "port") for service in settings}
    answers = [(place, *check_place(place)) for place in places(settings, tls, api_key)]
    running = {place.service for place, _, is_it in answers if is_it and not place.asked_by}
    findings = []
    for finding in examine(settings, origins, answers, running):
        findings.append(finding)
        if not as_json:
            _print(finding)
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    well = not counts[Level.PROBLEM]
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"ok": well, "findings": listed}, ensure_ascii=False, indent=1))
    else:
        nobody = "" if running else "; no service runs here"
        problems = counted(counts[Level.PROBLEM], "problem")
        warnings = counted(counts[Level.WARNING], "warning")
        click.echo(f"{problems}, {warnings}{nobody}")
    raise click.exceptions.Exit(0 if well else 1)


def examine(
    settings: Mapping[str, Any],
    origins: Mapping[str, str],
    answers: Sequence[tuple[Place, list[Finding], bool]],
    running: Collection[str],
) -> Iterator[Finding]:
    """Everything, as it is found. `settings` and `origins` (where a port is from) are by service,
    the draft's only where there should be one; `answers` are those of `check_place`, and `running`
    the services that are where this machine's own would be."""
    yield from check_machine(settings["target"], settings.get("draft"))
    yield from check_gateway_model(settings["gateway"], settings["target"])
    yield from check_target_model(settings["target"], "target" in running)
    if "draft" in settings:
        yield from check_draft_model(settings["draft"], "draft" in running)
    yield from check_tls(settings)
    yield _addresses(settings, origins, anybody=bool(running))
    for _, findings, _ in answers:
        yield from findings
    yield from check_http(settings)


def _addresses(
    settings: Mapping[str, Any], origins: Mapping[str, str], *, anybody: bool
) -> Finding:
    text = ", ".join(
        f"{service} {its.host}:{its.port} ({origins[service]})" for service, its in settings.items()
    )
    if not anybody:
        text += "; nobody is there: services that run elsewhere were given other settings"
    return ok("addresses", text)


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level:<8}", fg=COLOURS[finding.level])
    # Peers say some of it.
    click.echo(f"{level} {one_line(f'{finding.topic}: {finding.text}')}")
    if finding.advice:
        click.echo(f"{'':8}   -> {one_line(finding.advice)}")

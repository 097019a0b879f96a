"""`outrider doctor`: what is here, what is wrong, and what to do about it, in words.

Exit status: 0 nothing is wrong, 1 there is a problem, 2 wrong usage or settings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import click

from outrider.cli.check_machine import check_machine
from outrider.cli.check_model import check_draft_model, check_gateway_model, check_target_model
from outrider.cli.check_services import check_place, places
from outrider.cli.finding import Finding, Level
from outrider.cli.options import PREFIXES, build, stack_options
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings

COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@stack_options
def doctor(as_json: bool, **values: Any) -> None:
    """Look at this machine, the model and the services, and say what is wrong.

    Takes the settings of all services, so that it looks where they would. Exit status: 0 nothing
    is wrong (there may be warnings), 1 there is a problem, 2 wrong usage or settings.
    """
    findings = []
    for finding in examine(
        build(GatewaySettings, values, PREFIXES["gateway"]),
        build(TargetSettings, values, PREFIXES["target"]),
        build(DraftSettings, values, PREFIXES["draft"]),
    ):
        findings.append(finding)
        if not as_json:
            _print(finding)
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    well = not counts[Level.PROBLEM]
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"ok": well, "findings": listed}, ensure_ascii=False, indent=1))
    else:
        click.echo(f"{counts[Level.PROBLEM]} problems, {counts[Level.WARNING]} warnings")
    raise click.exceptions.Exit(0 if well else 1)


def examine(
    gateway: GatewaySettings, target: TargetSettings, draft: DraftSettings
) -> Iterator[Finding]:
    """Everything, as it is found."""
    yield from check_machine(target, draft)
    answers = [(place, *check_place(place)) for place in places(gateway, target, draft)]
    running = {place.service for place, _, is_it in answers if is_it and not place.asked_by}
    yield from check_gateway_model(gateway, target)
    yield from check_target_model(target, "target" in running)
    yield from check_draft_model(draft, "draft" in running)
    for _, findings, _ in answers:
        yield from findings


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level:<8}", fg=COLOURS[finding.level])
    click.echo(f"{level} {finding.topic}: {finding.text}")
    if finding.advice:
        click.echo(f"{'':8}   -> {finding.advice}")

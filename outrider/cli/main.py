"""The `outrider` command and its subcommands. Each one imports what it needs when it runs."""

from __future__ import annotations

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="outrider")
def main() -> None:
    """Serve a large model faster without changing what it says."""

"""The `outrider` command and its subcommands. Each one imports what it needs when it runs."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import click

from outrider.cli.terminal import adapt_streams, full_disks_told

# Where each subcommand lives: (module, attribute, one line of help). Modules are imported when
# their command is looked up, so that `outrider generate` never pays for what `models` needs.
COMMANDS = {
    "up": ("outrider.cli.up", "up", "Run gateway, target and draft on this machine."),
    "gateway": ("outrider.cli.services", "gateway", "Run the service that clients talk to."),
    "target": ("outrider.cli.services", "target", "Run the large model."),
    "draft": ("outrider.cli.services", "draft", "Run the drafter."),
    "generate": ("outrider.cli.generate", "generate", "Ask a gateway and stream the answer."),
    "chat": ("outrider.cli.chat", "chat", "Talk with the model."),
    "doctor": ("outrider.cli.doctor", "doctor", "Say what is wrong here, in words."),
    "config": ("outrider.cli.config", "config", "Show all settings and where each is from."),
    "models": ("outrider.cli.models", "models", "Models that can be fetched by name."),
    "keys": ("outrider.cli.keys", "keys", "API keys: make one, check and list their file."),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is asked for."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run; the first thing that happens, even before the help is shown."""
        adapt_streams()
        # gRPC's core writes lines of its own between our JSON; what matters is in its errors too.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        with full_disks_told():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, Ctrl-C being told by the status alone, also while it is imported."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise click.exceptions.Exit(128 + signal.SIGINT) from interrupt

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help's list, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])
        from outrider.serving.settings import OTHER_VARIABLES

        with formatter.section("Variables, besides one for each setting of a service"):
            formatter.write_dl([*OTHER_VARIABLES.items()])


@click.group(
    cls=LazyGroup,
    epilog="Exit status: 0 done; 1 failed, with the reason on standard error; 2 wrong usage or "
    "settings. Commands that ask a gateway have more: see their --help.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A TOML file with settings, for every command that takes some.",
)
@click.version_option(package_name="outrider")
@click.pass_context
def main(context: click.Context, config: Path | None) -> None:
    """Serve a large model faster without changing what it says."""
    from outrider.cli.options import check_environment

    check_environment(links_allowed=context.invoked_subcommand == "doctor")

"""`outrider gateway`, `outrider target`, `outrider draft`: run one service in this process."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
from typing import Any

import click

from outrider.cli.options import SERVICES, build, config_option, service_options
from outrider.model_error import ModelError
from outrider.serving.cores import usable_cores
from outrider.serving.errors import OutriderError
from outrider.serving.settings import SettingsError

MODULES = {
    "gateway": "gateway.service",
    "target": "target_service.service",
    "draft": "draft_service.service",
}
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies


def _set_threads(threads: int) -> None:
    """Tell OpenMP, before torch loads it, how many threads there are and that they must not spin.

    Two services whose idle threads spin on shared cores slow each other down several times.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads or usable_cores())
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _end_with_parent(parent: int) -> None:
    """Drain when the parent dies, however it dies. Linux only; elsewhere nothing happens.

    The kernel sends the signal for each thread of the parent that a child outlives, so it must be
    one that does not count as a second one; and `up` may run under nohup, which ignores it.
    """
    if not hasattr(ctypes.CDLL(None), "prctl"):
        return
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGHUP)


def _run(service: str, values: dict[str, Any]) -> None:
    parent = values.pop("with_parent")
    if parent:
        _end_with_parent(parent)
    settings = build(SERVICES[service], values)
    if "threads" in values:
        _set_threads(values["threads"])
    extra = service
    try:
        run = importlib.import_module(MODULES[service]).run
        if service == "draft":
            extra = "draft-model"  # what its proposer needs is imported when it is made
        run(settings)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{service} needs the package {error.name}; run: pip install 'outrider[{extra}]'"
        ) from error
    except SettingsError as error:
        raise click.UsageError(f"{service}: {error}") from error
    except (OutriderError, ModelError, OSError, ValueError) as error:
        raise click.ClickException(f"{service}: {error}") from error


def _command(service: str, about: str) -> click.Command:
    @click.command(service, help=about)
    @config_option({service: ""})
    @service_options(service)
    @click.option("--with-parent", type=int, default=0, hidden=True)
    def command(**values: Any) -> None:
        _run(service, values)

    return command


gateway = _command("gateway", "Text in, text out: the service that clients talk to.")
target = _command("target", "Token ids in, token ids out: the large model.")
draft = _command("draft", "The drafter: proposes tokens to targets.")

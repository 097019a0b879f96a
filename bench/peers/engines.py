"""The engines of one bench: who is here, who is missing and why, and who computes out of turn."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers import install
from bench.peers.install import Missing
from bench.peers.lines import Answer
from bench.peers.worker import Worker, WorkerFailed
from outrider.models.catalogue import find
from outrider.models.resolve import resolve

MODEL = "smollm2-135m-instruct"
HERE = Path(__file__).parent

Prompts = Sequence[Sequence[int]]
"""Ids of each."""


class Engines:
    """Workers by name, and the one that all others are compared with. Close it."""

    def __init__(self, ours: str, make: Callable[[], Worker]) -> None:
        """Raises WorkerFailed where even that one cannot be asked."""
        self.ours = ours
        self.missing: dict[str, str] = {}
        """Why one of the others cannot be asked."""
        print(f"starting {ours}", file=sys.stderr, flush=True)
        self._workers = {ours: make()}
        self.idle_share = {ours: 0.0}
        """The most processor time a second that one took while another was asked."""

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()

    @property
    def versions(self) -> dict[str, str]:
        """What each that can be asked calls itself."""
        return {name: worker.name for name, worker in self._workers.items()}

    def start(self, name: str, make: Callable[[], Worker]) -> None:
        """Start it, or note why that is impossible."""
        print(f"starting {name}", file=sys.stderr, flush=True)
        try:
            self._workers[name] = make()
        except (Missing, WorkerFailed, OSError) as error:
            self._lose(name, error)
        else:
            self.idle_share[name] = 0.0

    def ask_ours(self, prompts: Prompts, num_tokens: int) -> Answer:
        """All prompts at once. Raises WorkerFailed."""
        return self._ask(self.ours, prompts, num_tokens)

    def ask(self, name: str, prompts: Prompts, num_tokens: int) -> Answer | None:
        """The same of another; None from one that is missing, or fails now."""
        if name in self.missing:
            return None
        try:
            return self._ask(name, prompts, num_tokens)
        except WorkerFailed as error:
            self._workers.pop(name).close()
            self._lose(name, error)
            return None

    def _ask(self, name: str, prompts: Prompts, num_tokens: int) -> Answer:
        idle = {other: worker for other, worker in self._workers.items() if other != name}
        before = {other: worker.processor_s for other, worker in idle.items()}
        answer = self._workers[name].ask(prompts, num_tokens)
        for other, worker in idle.items():
            share = (worker.processor_s - before[other]) / answer.seconds
            self.idle_share[other] = max(self.idle_share[other], round(share, 3))
        return answer

    def _lose(self, name: str, error: Exception) -> None:
        self.missing[name] = str(error)
        print(f"without {name}: {error}", file=sys.stderr, flush=True)


def outrider(dtype: str, threads: int, door: str, model: str = MODEL) -> Worker:
    """The services; `door` is gateway or target."""
    module = "bench.peers.worker_outrider"
    return _python(sys.executable, module, [model, dtype, str(threads), door], f"outrider-{door}")


def engine(dtype: str, threads: int, model: str = MODEL) -> Worker:
    """Outrider's engine in one process."""
    module = "bench.peers.worker_engine"
    return _python(sys.executable, module, [model, dtype, str(threads)], "outrider-engine")


def transformers(threads: int, mode: str) -> Worker:
    """In bfloat16; `mode` is one or many."""
    install.need("transformers")
    arguments = [str(resolve(MODEL)), str(threads), mode]
    return _python(sys.executable, "bench.peers.worker_transformers", arguments, "transformers")


def openvino(threads: int, mode: str) -> Worker:
    """With the GGUF; `mode` is one or many."""
    arguments = [str(install.gguf(find(MODEL))), str(threads), mode]
    python = str(install.openvino_python())
    return _python(python, "bench.peers.worker_openvino", arguments, "openvino")


def llama(threads: int) -> Worker:
    """llama.cpp with the GGUF, one prompt at a time."""
    modules, script = install.llama_modules(), HERE / "worker_llama.mjs"
    arguments = [str(modules), str(install.gguf(find(MODEL))), str(threads)]
    command = [str(install.node()), str(script), *arguments]
    return Worker(command, install.FOLDER / "llama.log")


def _python(python: str, module: str, arguments: list[str], log: str) -> Worker:
    root = str(HERE.parent.parent)
    path = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return Worker(
        [python, "-m", module, *arguments],
        install.FOLDER / f"{log}.log",
        {"PYTHONPATH": os.pathsep.join(filter(None, path))},
    )

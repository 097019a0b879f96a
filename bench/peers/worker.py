"""A worker process from its parent's end: starts it, asks it, and looks at how busy it is."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.lines import Answer
from bench.process_use import tree_processor_s

STOP_TIMEOUT_S = 60.0


class WorkerFailed(Exception):
    """It ended; the message has its last words."""


class Worker:
    """One engine in a process of its own, alive until it is closed."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Raises WorkerFailed when it ends before it can be asked. `environment` is added."""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        self.name: str = self._read()["name"]

    def ask(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answer:
        """All prompts at once. Raises WorkerFailed, also for answers of another length."""
        assert self._process.stdin is not None
        question = {"prompts": prompts, "num_tokens": num_tokens}
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failed() from None
        answer = Answer(**self._read())
        lengths = [len(text) for text in answer.texts]
        if lengths != [num_tokens] * len(prompts):
            raise WorkerFailed(f"{self.name} made {lengths} tokens, {num_tokens} each were asked")
        return answer

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def processor_s(self) -> float:
        """Of it and its children."""
        return tree_processor_s(self._process.pid)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> WorkerFailed:
        status = self._process.wait()
        self.close()
        said = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        return WorkerFailed(f"it ended with status {status} and said: {said[0]}")

"""Benches beside other engines: their workers, their arithmetic, and what the last line says."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from bench.busy import Bystanders
from bench.peers import engines, install
from bench.peers.engines import Engines
from bench.peers.install import Missing
from bench.peers.lines import Answer
from bench.peers.prompts import prompts, questions
from bench.peers.worker import Worker, WorkerFailed
from bench.process_use import tree_processor_s
from bench.single_stream import OURS, later_rate, measure, rate, report
from bench.stream_costs import costs
from bench.throughput import Bench
from tests.support.gateways import write_tokenizer_folder
from tests.support.tiny_models import make_tiny_model

ROOT = Path(__file__).parent.parent.parent


def fake(tmp_path: Path, speed: float | str) -> Worker:
    """A worker that says it makes so many tokens a second."""
    script = str(Path(__file__).parent / "fake_worker.py")
    return Worker([sys.executable, script, str(speed)], tmp_path / "log", {"PYTHONPATH": str(ROOT)})


def test_a_worker_answers(tmp_path: Path) -> None:
    """Line by line, whatever its libraries print meanwhile; that is in its log."""
    worker = fake(tmp_path, 100)
    answer = worker.ask([[5, 6], [7]], 3)
    assert worker.ask([[8]], 1).texts == [[8]]
    worker.close()
    assert worker.name == "fake 100"
    assert answer.texts == [[5, 5, 5], [7, 7, 7]]
    assert rate(answer) == pytest.approx(100)
    assert (tmp_path / "log").read_text().count("no answer") == 2


def test_an_answer_of_another_length_is_no_measurement(tmp_path: Path) -> None:
    """The worker is asked for 4 tokens and makes 3."""
    worker = fake(tmp_path, 100)
    with pytest.raises(WorkerFailed, match=r"made \[3\] tokens, 4 each were asked"):
        worker.ask([[0]], 4)
    worker.close()


def test_a_worker_that_ends_says_why(tmp_path: Path) -> None:
    """With its last words."""
    with pytest.raises(WorkerFailed, match="status 1 and said: it cannot run here"):
        fake(tmp_path, "ends")


def test_rates() -> None:
    """All tokens over the whole time; of one stream, also without the first token and its time."""
    answer = Answer(3.0, 1.0, [[1] * 11])
    assert rate(answer) == pytest.approx(11 / 3)
    assert later_rate(answer) == pytest.approx(5)
    assert rate(Answer(2.0, None, [[1] * 4, [2] * 4])) == pytest.approx(4)


def test_one_stream_beside_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Medians, ratios with an interval, and null with a reason for who is missing."""

    def gone() -> Worker:
        raise Missing("no such package")

    with Engines(OURS, lambda: fake(tmp_path / "ours", 90)) as running:
        running.start("half", lambda: fake(tmp_path / "half", 45))
        running.start("ends", lambda: fake(tmp_path / "ends", "ends"))
        running.start("gone", gone)
        pairs = measure(running, ["half", "ends", "gone"], [[1], [2], [3]], 8, rounds=4)
        line = json.loads(json.dumps(report(pairs, running)))
    assert line["tokens_per_s"] == {OURS: 90, "half": 45, "ends": None, "gone": None}
    assert line["ratio"]["half"] == {"mean": 2, "low": 2, "high": 2, "pairs": 4}
    assert line["ratio"]["ends"] is line["ratio"]["gone"] is None
    assert line["missing"]["gone"] == "no such package"
    assert "it cannot run here" in line["missing"]["ends"]
    assert line["engines"] == {OURS: "fake 90", "half": "fake 45"}
    assert line["idle_share"].keys() == {OURS, "half"}
    assert "half 90.0/45.0" in capsys.readouterr().out


def test_a_peer_that_fails_halfway_is_missing(tmp_path: Path) -> None:
    """What it said before is no figure: its last prompt makes it answer too short."""
    with Engines(OURS, lambda: fake(tmp_path / "ours", 90)) as running:
        running.start("half", lambda: fake(tmp_path / "half", 45))
        assert running.ask("half", [[1]], 4) is not None
        assert running.ask("half", [[0]], 4) is None
        assert running.ask("half", [[1]], 4) is None
        assert "made [3] tokens" in running.missing["half"]


def test_without_ours_there_is_no_bench(tmp_path: Path) -> None:
    """Then it fails, rather than compare the others."""
    with pytest.raises(WorkerFailed):
        Engines(OURS, lambda: fake(tmp_path, "ends"))


def test_many_streams_beside_others(tmp_path: Path) -> None:
    """By number of streams; what is missing is null, and ours is measured all the same."""
    with Engines(OURS, lambda: fake(tmp_path / "ours", 90)) as running:
        running.start("third", lambda: fake(tmp_path / "third", 30))
        running.start("ends", lambda: fake(tmp_path / "ends", "ends"))
        bench = Bench(running, ["third", "ends"], [[1], [2], [3], [4]], 8, streams=(1, 4))
        bench.warm()
        bench.round()
        bench.round()
        line = json.loads(json.dumps(bench.report()))
    assert line["tokens_per_s"] == {
        OURS: {"1": 90, "4": 90},
        "third": {"1": 30, "4": 30},
        "ends": None,
    }
    assert line["ratio"]["third"]["4"] == {"mean": 3, "low": 3, "high": 3, "pairs": 2}
    assert line["ratio"]["ends"] is None
    assert line["over_one_stream"] == {"4": {"mean": 1, "low": 1, "high": 1, "pairs": 2}}


def compute(seconds: float) -> None:
    """Keep this thread busy for so much processor time."""
    began = time.process_time()
    while time.process_time() - began < seconds:
        math.factorial(500)


def test_processor_time_of_a_tree() -> None:
    """What this process computes counts, and what a child does; one that has ended has none."""
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    before = tree_processor_s(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        compute(0.1)
        assert tree_processor_s(child.pid) >= 0.18
        assert tree_processor_s(os.getpid()) - before >= 0.26
        child.stdin.close()
    assert tree_processor_s(child.pid) == 0


def test_own_work_is_no_bystanders(tmp_path: Path) -> None:
    """Of what this process computes nothing is counted: at most all cores but the one it keeps."""
    bystanders = Bystanders()
    compute(0.3)
    assert 0 <= bystanders.cores <= (os.cpu_count() or 1)


@pytest.mark.slow  # starts a target
@pytest.mark.timeout(120)
def test_costs_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each service's threads have computed something, for each text."""
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    model = str(make_tiny_model(tmp_path / "tiny"))
    worker = engines.outrider("float32", 1, "gateway", model)
    measured = costs(worker, [[5, 6], [7]], 8)
    worker.close()
    for name in ("target, main thread", "target, other threads", "gateway, main thread", "clock"):
        assert len(measured[name]) == 2
        assert min(measured[name]) > 0


def test_prompts_differ(tmp_path: Path) -> None:
    """All 112 of them, with the model's template."""
    assert len(set(islice(questions(), 112))) == 112
    folder = write_tokenizer_folder(tmp_path / "tiny")
    ids = list(islice(prompts(folder), 3))
    assert len({tuple(each) for each in ids}) == 3


def test_what_npm_says_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that cannot be installed is missing, with the last words of whoever tried."""
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    monkeypatch.setattr(install, "LLAMA", "0.0.0-none")
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    with pytest.raises(Missing, match="npm failed and said: "):
        install.llama_modules()
    assert not (tmp_path / "llama" / ".installed").exists()


@pytest.mark.slow  # a minute on a busy machine: it starts a target twice
@pytest.mark.timeout(180)
def test_our_own_workers_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through gateway and target, of the target, of the engine alone: the same tokens."""
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    model = str(make_tiny_model(tmp_path / "tiny"))
    makers: list[Callable[[], Worker]] = [
        lambda: engines.engine("float32", 1, model),
        lambda: engines.outrider("float32", 1, "target", model),
        lambda: engines.outrider("float32", 1, "gateway", model),
    ]
    answers = []
    for make in makers:
        worker = make()
        answers.append(worker.ask([[5, 6, 7], [8, 9]], 6))
        worker.close()
    assert answers[0].texts == answers[1].texts == answers[2].texts
    assert all(0 < (each.first_s or 0) <= each.seconds for each in answers)

"""`outrider doctor`: each thing that can be wrong is named, with what to do and the exit status."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.cli.check_machine import check_machine, check_packages
from outrider.cli.demo import free_ports
from outrider.cli.finding import Finding, Level
from outrider.cli.main import main
from outrider.serving.settings import DraftSettings, TargetSettings
from outrider_kernels import native_build
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, target_pb2, target_pb2_grpc
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(90)  # the tiny model needs a heavy import


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


_NO_METRICS = [f"--{service}-metrics-port=-1" for service in ("gateway", "target", "draft")]
NO_HTTP = [*_NO_METRICS, "--gateway-http-port=-1"]


class Doctor:
    """`outrider doctor --json` on free ports, and what it said."""

    def __init__(self, model: Path, *arguments: str) -> None:
        gateway, target, draft = free_ports(3)
        command = ["doctor", "--json", *NO_HTTP]
        command += [f"--gateway-port={gateway}", f"--target-port={target}"]
        command += [f"--draft-port={draft}", f"--gateway-targets=127.0.0.1:{target}"]
        command += [f"--target-drafters=127.0.0.1:{draft}"]
        command += [f"--gateway-model={model}", f"--target-model={model}", *arguments]
        result = CliRunner().invoke(main, command)
        assert result.exit_code in (0, 1), result.output
        self.status = result.exit_code
        self.report = json.loads(result.stdout)
        assert self.report["ok"] is (result.exit_code == 0)

    def find(self, topic: str, level: str) -> dict[str, str]:
        """The first finding of that level about something whose name begins so."""
        for finding in self.report["findings"]:
            if finding["topic"].startswith(topic) and finding["level"] == level:
                assert bool(finding["advice"]) is (level != "ok")
                return finding
        raise AssertionError(f"no {level} of {topic}: {self.report['findings']}")


class Scripted(inference_pb2_grpc.InferenceServicer, target_pb2_grpc.TargetServicer):
    """A gateway and a target that say what the test wants."""

    def __init__(self) -> None:
        self.status = target_pb2.TargetGetStatusResponse(model="tiny", state="serving")
        self.ready = True

    def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[pb.Model(name="tiny", ready=self.ready)])

    def GetStatus(self, request, context):
        return self.status


@contextmanager
def serving(script: Scripted, *names: str) -> Iterator[int]:
    """The port of a server whose health knows these services."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    for name in names:
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    inference_pb2_grpc.add_InferenceServicer_to_server(script, server)
    target_pb2_grpc.add_TargetServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait(5)


TARGET = "outrider.v1.Target"
GATEWAY = "outrider.v1.Inference"


def test_a_machine_where_all_is_well(model: Path) -> None:
    """A model that is here, memory for it and free ports: status 0, and no problem anywhere."""
    doctor = Doctor(model)
    assert doctor.status == 0
    assert "free" in doctor.find("target 127", "ok")["text"]
    assert "tokens" in doctor.find("target memory", "ok")["text"]
    for topic in ("python", "torch", "cpu", "gpu"):
        doctor.find(topic, "ok")


def test_lines_for_people(model: Path) -> None:
    """Without --json each finding is a line with its level, and what to do is below it."""
    ports = [f"--{name}-port={port}" for name, port in zip(("gateway", "target", "draft"),
             free_ports(3), strict=True)]  # fmt: skip
    command = ["doctor", *NO_HTTP, *ports, "--target-model=/nothing/here"]
    command.append(f"--gateway-model={model}")
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "problem  target model: '/nothing/here' is no model folder" in result.output
    assert "-> give a folder" in result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("1 problem, ") and last.endswith("; no service runs here")


def test_a_model_that_was_not_fetched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of the catalogue that is not in the cache: the command that fetches it is named."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    doctor = Doctor(model, "--target-model=smollm2-135m-instruct")
    assert doctor.status == 1
    advice = doctor.find("target model", "problem")["advice"]
    assert advice == "run: outrider models fetch smollm2-135m-instruct"


def test_a_model_that_is_cut(tmp_path: Path) -> None:
    """A weight file that lacks its end is found without loading it."""
    folder = make_tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    doctor = Doctor(folder)
    assert doctor.status == 1
    assert "is cut" in doctor.find("target model", "problem")["text"]


def test_a_cache_that_does_not_fit(model: Path) -> None:
    """More tokens than memory: the text says what is needed and what is free."""
    doctor = Doctor(model, f"--target-kv-tokens={10**13}")
    assert doctor.status == 1
    assert "MiB are free" in doctor.find("target memory", "problem")["text"]


@pytest.mark.parametrize(
    ("flags", "precision", "mib"),
    [
        (["--target-dtype=float32"], "float32", 8),
        (["--target-dtype=bfloat16"], "bfloat16", 4),
        (["--target-dtype=int8"], "int8", 4),
        (["--target-dtype=int4"], "int4", 4),
    ],
)
def test_a_precision_says_what_its_cache_takes(
    model: Path, flags: list[str], precision: str, mib: int
) -> None:
    """In int8 and int4 it is bfloat16's."""
    doctor = Doctor(model, *flags, "--target-kv-tokens=16384")
    text = doctor.find("target memory", "ok")["text"]
    assert f"of weights in {precision} and {mib} MiB of cache for 16384 tokens" in text


def test_without_a_precision_the_most_is_said(model: Path) -> None:
    """Which matrices 4 bits hold is known only when they are read: none, as far as it knows."""
    found = [
        Doctor(model, *flags, "--target-kv-tokens=16384").find("target memory", "ok")["text"]
        for flags in ([], ["--target-dtype=int8"])
    ]
    most = found[1].partition(" in int8 and ")[0]
    assert found[0].startswith(f"at most {most}, in int8 or losslessly in int4, and 4 MiB of cache")


@pytest.mark.timeout(120)  # it loads a model, and may be the first to compile
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("tied_head", [True, False])
def test_what_rounded_weights_take_is_estimated(
    tmp_path: Path, tied_head: bool, dtype: str
) -> None:
    """A head in bytes, a table that is none in bfloat16: as much as the loaded model takes."""
    from outrider.engine.model import LlamaModel

    folder = make_tiny_model(tmp_path, vocab_size=49152, tied_head=tied_head)
    text = Doctor(folder, f"--target-dtype={dtype}").find("target memory", "ok")["text"]
    model = LlamaModel.load(folder, dtype)
    taken = model.weight_bytes + (0 if model._embedding is None else model._embedding.nbytes)
    assert f"{taken / 2**20:.0f} MiB of weights" in text


def test_an_int8_cache_takes_about_half_of_bfloat16(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of a byte, and a scale of two for the 16 of a head of this model."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    flags = ("--target-dtype=bfloat16", "--target-kv-dtype=int8", "--target-kv-tokens=65536")
    text = Doctor(model, *flags).find("target memory", "ok")["text"]
    assert "and 9 MiB of cache for 65536 tokens" in text
    text = Doctor(model, *flags, "--target-kernels=triton").find("target memory", "ok")["text"]
    assert "and 10 MiB of cache for 65536 tokens" in text  # a scale of four bytes


def test_a_cache_in_e4m3_is_for_tritons_kernels(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem before the start; where they compute, as small as int8."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    e4m3 = "--target-kv-dtype=e4m3"
    found = Doctor(model, e4m3).find("target memory", "problem")
    assert "needs Triton's kernels" in found["text"] and "kv_dtype" in found["advice"]
    flags = (e4m3, "--target-kernels=triton", "--target-kv-tokens=65536")
    text = Doctor(model, *flags).find("target memory", "ok")["text"]
    assert "and 10 MiB of cache for 65536 tokens" in text


def test_tritons_kernels_are_for_a_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem before the start, where the target would end with it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = Doctor(model, "--target-kernels=triton").find("target kernels", "problem")
    assert "need a GPU" in found["text"] and "kernels to auto" in found["advice"]


@pytest.mark.parametrize(
    ("setting", "topic"),
    [
        ("--target-device=tpu", "target device"),
        ("--target-device=cuda:99", "target device"),
    ],
)
def test_a_device_that_cannot_be(model: Path, setting: str, topic: str) -> None:
    """Named, with what there is."""
    doctor = Doctor(model, setting)
    assert doctor.status == 1
    assert setting.partition("=")[2] in doctor.find(topic, "problem")["text"]


def test_a_port_of_somebody_else(model: Path) -> None:
    """A listener that is no gRPC server, a gRPC server that is no target, and one that is stuck."""
    with ExitStack() as resources:
        silent = resources.enter_context(socket.create_server(("127.0.0.1", 0)))
        rude = resources.enter_context(socket.create_server(("127.0.0.1", 0)))
        other = resources.enter_context(serving(Scripted(), "somebody.Else"))

        def hang_up() -> None:
            while True:
                try:
                    caller, _ = rude.accept()
                except OSError:
                    return
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                caller.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        doctor = Doctor(
            model,
            f"--gateway-port={silent.getsockname()[1]}",
            f"--target-port={other}",
            f"--draft-port={rude.getsockname()[1]}",
        )
        rude.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    assert doctor.status == 1
    assert "does not answer" in doctor.find("gateway 127", "problem")["text"]
    assert "is no target" in doctor.find("target 127", "problem")["text"]
    found = doctor.find("draft 127", "problem")
    assert "no gRPC" in found["text"] and "--draft-port" in found["advice"]


def test_running_services_say_what_they_do(model: Path) -> None:
    """A target's state and load; each drafter that is unused and why; the gateway's model."""
    script = Scripted()
    script.status.load.running = 3
    script.status.drafters.add(address="a:1", state="ready")
    script.status.drafters.add(address="b:2", state="refused", reason="token tables differ")
    with serving(script, TARGET, GATEWAY) as port:
        doctor = Doctor(model, f"--gateway-port={port}", f"--target-port={port}")
    assert doctor.status == 0
    assert "serving: tiny, 3 running" in doctor.find(f"target 127.0.0.1:{port}", "ok")["text"]
    assert doctor.find("target memory", "ok")["text"] == "taken: the service runs"
    refused = doctor.find(f"target 127.0.0.1:{port} drafter b:2", "warning")
    assert refused["text"] == "unused: refused (token tables differ)"
    assert "serves tiny" in doctor.find("gateway", "ok")["text"]


def test_where_a_service_runs_the_last_line_is_the_count(model: Path) -> None:
    """The services' own lines say what they do."""
    with serving(Scripted(), TARGET, GATEWAY) as port:
        ports = [f"--gateway-port={port}", f"--target-port={port}", "--no-draft"]
        result = CliRunner().invoke(main, ["doctor", *NO_HTTP, *ports, f"--model={model}"])
    assert result.output.splitlines()[-1].endswith(" warnings")


def test_ports_for_metrics_are_looked_at(model: Path) -> None:
    """What listens there and is none of ours is a problem."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        doctor = Doctor(model, f"--target-metrics-port={somebody.getsockname()[1]}")
    assert doctor.status == 1
    doctor.find("target metrics", "problem")


def test_the_port_of_openais_api_is_looked_at(model: Path) -> None:
    """The same for the gateway's HTTP port."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        doctor = Doctor(model, f"--gateway-http-port={somebody.getsockname()[1]}")
    assert doctor.status == 1
    doctor.find("gateway HTTP", "problem")


def test_services_that_are_not_well(model: Path) -> None:
    """A dead target, wrong books of the cache, a gateway without targets: problems."""
    script = Scripted()
    script.ready = False
    script.status.state = "dead"
    with serving(script, TARGET, GATEWAY) as port:
        ports = [f"--gateway-port={port}", f"--target-port={port}"]
        doctor = Doctor(model, *ports)
        script.status.state = "serving"
        script.status.pool.integrity_errors.append("block 3 is held twice")
        again = Doctor(model, *ports)
    assert doctor.status == again.status == 1
    assert "no target is ready" in doctor.find("gateway", "problem")["text"]
    assert "dead" in doctor.find("target", "problem")["text"]
    assert "block 3 is held twice" in again.find("target", "problem")["text"]


def test_addresses_that_others_name(model: Path) -> None:
    """A target that the gateway should use, and a drafter, where nobody listens: warnings."""
    away = free_ports(2)
    doctor = Doctor(
        model, f"--gateway-targets=127.0.0.1:{away[0]}", f"--target-drafters=127.0.0.1:{away[1]}"
    )
    assert doctor.status == 0
    text = doctor.find(f"target 127.0.0.1:{away[0]}", "warning")["text"]
    assert text == "nobody listens; the gateway goes on without it"
    doctor.find(f"draft 127.0.0.1:{away[1]}", "warning")


@pytest.mark.parametrize("by", ["flag", "variable", "file"])
def test_it_looks_where_up_puts_the_services(model: Path, tmp_path: Path, by: str) -> None:
    """A port that `outrider up` was given, wherever: the service is looked for there and nowhere
    else, also by those that call it, and the report says where and why there."""
    script = Scripted()
    with serving(script, TARGET) as target:
        gateway, draft = free_ports(2)
        ports = {"gateway": gateway, "target": target, "draft": draft}
        command, env = ["doctor", "--json", *NO_HTTP, f"--model={model}"], {}
        if by == "flag":
            command += [f"--{service}-port={port}" for service, port in ports.items()]
        elif by == "variable":
            env = {f"OUTRIDER_{service.upper()}_PORT": str(port) for service, port in ports.items()}
        else:
            path = tmp_path / "outrider.toml"
            path.write_text("".join(f"[{each}]\nport = {port}\n" for each, port in ports.items()))
            command.append(f"--config={path}")
        result = CliRunner().invoke(main, command, env=env)
    findings = {each["topic"]: each for each in json.loads(result.stdout)["findings"]}
    looked_at = {topic for topic in findings if ":" in topic}
    assert looked_at == {f"{service} 127.0.0.1:{port}" for service, port in ports.items()}
    text = findings["addresses"]["text"]
    assert f"target 127.0.0.1:{target} ({by} " in text
    assert "nobody is there" not in text
    assert str(model) in findings["target model"]["text"]


def test_without_a_drafter_none_is_looked_for(model: Path) -> None:
    """As `outrider up --no-draft` runs none; and with nobody anywhere, the report says so."""
    ports = [
        f"--{name}-port={port}"
        for name, port in zip(("gateway", "target"), free_ports(2), strict=True)
    ]
    command = ["doctor", "--json", f"--model={model}", "--no-draft", *ports]
    result = CliRunner().invoke(main, command)
    findings = {each["topic"]: each for each in json.loads(result.stdout)["findings"]}
    assert not any(topic.startswith("draft") for topic in findings)
    assert "nobody is there" in findings["addresses"]["text"]


def test_packages_that_are_missing_or_old() -> None:
    """A missing package is a problem with the command that brings it, unless nothing needs it."""
    packages = (("no-such-package", "target", False), ("nor-this", None, True))
    needed, spare = check_packages(packages)
    assert (needed.level, spare.level) == (Level.PROBLEM, Level.OK)
    assert needed.advice == "run: pip install 'outrider[target]'"


def test_threads_and_variables_that_slow_things_down() -> None:
    """More threads than cores, and threads told to spin, are warnings."""
    environment = {"OMP_WAIT_POLICY": "active"}
    findings = list(check_machine(TargetSettings(threads=4096), DraftSettings(), environment))
    warned = {finding.topic for finding in findings if finding.level is Level.WARNING}
    assert {"threads", "environment"} <= warned


def test_a_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning where steps would be compiled C++, with why they are not; else not a word."""
    monkeypatch.setattr(native_build, "BEFOREHAND", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")

    def found(target: TargetSettings, draft: DraftSettings) -> list[Finding]:
        every = check_machine(target, draft, {})
        return [finding for finding in every if finding.topic == "operations"]

    (missing,) = found(TargetSettings(), DraftSettings())
    assert missing.level is Level.WARNING and "'no-such-compiler'" in missing.text
    plain = TargetSettings(kernels="torch")
    assert not found(plain, DraftSettings())
    assert found(plain, DraftSettings(proposer="model", model="tiny")) == [missing]

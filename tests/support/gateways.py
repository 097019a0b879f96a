"""A gateway on a loopback port in front of a scripted target, and short ways to ask it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.service import GatewayService
from outrider.engine.fingerprints import token_table_hash
from outrider.serving.channel import open_channel
from outrider.serving.server import Listening, listening
from outrider.serving.settings import GatewaySettings
from outrider.serving.tls import ClientTls
from outrider.serving.tracing import Tracing
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1 import inference_pb2_grpc, sampling_pb2, target_pb2
from tests.support.scripted_target import Script, ScriptedTarget, serving

MAX_MODEL_LEN = 256
VOCAB_SIZE = 512
EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXTS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "def main():\n    return 42\n\nEND of the story, END of the line, ENDING well.\n",
    "안녕하세요 만나서 반갑습니다 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
]


def write_tokenizer_folder(folder: Path) -> Path:
    """A model folder without weights: byte-level BPE of 400 tokens in a vocabulary of 512."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 20, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": 2,
    }
    settings = {"bos_token": "<|im_start|>", "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def target_status(folder: Path) -> target_pb2.TargetGetStatusResponse:
    """What a target that serves this folder says of itself."""
    config = json.loads((folder / "config.json").read_text())
    return target_pb2.TargetGetStatusResponse(
        model=folder.name,
        token_table_hash=token_table_hash(folder),
        vocab_size=config["vocab_size"],
        max_model_len=config["max_position_embeddings"],
        max_draft_tokens=8,
        state="serving",
        instance_id="scripted",
        eos_token_ids=[config["eos_token_id"]],
    )


@dataclass
class Answer:
    """All messages of one stream."""

    deltas: list[str] = field(default_factory=list)
    tokens: list[sampling_pb2.GeneratedToken] = field(default_factory=list)
    finish: pb.GenerateFinish | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.deltas)

    @property
    def ids(self) -> list[int]:
        """All token ids."""
        return [token.id for token in self.tokens]

    @property
    def reason(self) -> str:
        """STOP or LENGTH."""
        assert self.finish is not None
        name = sampling_pb2.FinishReason.Name(self.finish.reason)
        return name.removeprefix("FINISH_REASON_")

    def add(self, response: pb.GenerateResponse) -> None:
        """The next message. Nothing comes behind the finish."""
        assert self.finish is None
        if response.HasField("finish"):
            self.finish = response.finish
        else:
            self.deltas.append(response.chunk.text)
            self.tokens.extend(response.chunk.tokens)


@dataclass
class Gateway:
    """A running gateway as a client sees it."""

    address: str
    channel: grpc.aio.Channel
    service: GatewayService
    listening: Listening | None = None

    @property
    def stub(self) -> inference_pb2_grpc.InferenceStub:
        """The client."""
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def num_running(self) -> int:
        """Requests that hold a place, of any method."""
        return self.service._inference._admission.num_running

    async def ask(self, request: pb.GenerateRequest, timeout_s: float = 10) -> Answer:
        """Read one answer to its end."""
        answer = Answer()
        async for response in self.stub.Generate(request, timeout=timeout_s):
            answer.add(response)
        return answer

    async def ask_choices(self, request: pb.GenerateRequest, timeout_s: float = 10) -> list[Answer]:
        """Read all choices of one answer to their ends."""
        answers = [Answer() for _ in range(request.n)]
        async for response in self.stub.Generate(request, timeout=timeout_s):
            part = response.finish if response.HasField("finish") else response.chunk
            answers[part.index].add(response)
        assert all(answer.finish is not None for answer in answers)
        return answers

    async def wait_health(self, serving_expected: bool, timeout_s: float = 5) -> None:
        """Return when the gateway's health is as expected."""
        states = health_pb2.HealthCheckResponse
        wanted = states.SERVING if serving_expected else states.NOT_SERVING
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(
            health_pb2.HealthCheckRequest(service="outrider.v1.Inference"), timeout=timeout_s
        )
        async for response in watch:
            if response.status == wanted:
                break
        watch.cancel()


@contextlib.asynccontextmanager
async def gateway_on(
    folder: Path,
    targets: Sequence[str],
    *,
    tracing: Tracing | None = None,
    tls: ClientTls | None = None,
    **settings: object,
) -> AsyncIterator[Gateway]:
    """A gateway for this folder, without waiting for its targets. tls: how the test asks it."""
    chosen = {"http_port": -1} | settings
    service = GatewayService(
        GatewaySettings(model=str(folder), targets=",".join(targets), **chosen), tracing
    )
    async with listening(service, "127.0.0.1", 0) as running:
        address = f"127.0.0.1:{running.port}"
        async with open_channel(address, tls=tls) as channel:
            yield Gateway(address, channel, service, running)


@contextlib.asynccontextmanager
async def gateway_with(
    folder: Path, script: Script, *, tracing: Tracing | None = None, **settings: object
) -> AsyncIterator[tuple[Gateway, ScriptedTarget]]:
    """A ready gateway in front of one scripted target."""
    async with (
        serving(script, target_status(folder)) as target,
        gateway_on(folder, [target.address], tracing=tracing, **settings) as gateway,
    ):
        await gateway.wait_health(True)
        yield gateway, target


async def until(condition: Callable[[], bool], timeout_s: float = 5) -> None:
    """Wait for a condition that another task brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)

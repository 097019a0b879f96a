"""What `outrider doctor` says of a configured model: is it here, is it whole, does it fit.

Never downloads and never converts. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from outrider.cli.finding import Finding, ok, problem, warning
from outrider.engine.block_pool import BLOCK_SIZE
from outrider.engine.config import ModelConfig
from outrider.engine.memory import DoesNotFit, PoolSize, block_bytes, free_host_bytes
from outrider.engine.precision import EITHER, choose_kv_precision, choose_precision
from outrider.engine.weight_files import weight_files
from outrider.model_error import ModelError
from outrider.models import catalogue, store
from outrider.models.gguf_import import GgufSource
from outrider.models.hub import TOKENIZER_FILES, WEIGHT_FILES, HubModel
from outrider.serving.settings import DraftSettings, GatewaySettings, TargetSettings

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0625, EITHER: 1.0625, "int4": 0.625}
"""Of a parameter; int8 has scales, int4 steps and lowest values. The most it may be of EITHER:
what int4 loses is known only when weights are read."""
HEAD_BYTES = WEIGHT_BYTES | {"int4": WEIGHT_BYTES["int8"]}
"""Of one in the head, which is the table as well where there is no other."""
TABLE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 2.0, EITHER: 2.0, "int4": 2.0}
"""Of one in a table that is not the head as well; it is looked up and never multiplied."""
MIB = 2**20


def check_target_model(settings: TargetSettings, running: bool) -> Iterator[Finding]:
    """The target's model and the memory that it takes, unless it has taken it already."""
    pool = PoolSize(settings.kv_tokens, settings.kv_blocks, settings.kv_bytes, settings.kv_fraction)
    yield from _check("target", settings, pool, running)


def check_gateway_model(gateway: GatewaySettings, target: TargetSettings) -> Iterator[Finding]:
    """The gateway's, of which it needs the tokenizer, if it is not the target's."""
    if gateway.model == target.model:
        return
    found = find("gateway model", gateway.model)
    if isinstance(found, Finding):
        yield found
        return
    yield warning(
        "gateway model",
        f"{gateway.model} here, {target.model} at the target",
        "fine if the target runs elsewhere; else set [gateway] and [target] model to the same",
    )


def check_draft_model(settings: DraftSettings, running: bool) -> Iterator[Finding]:
    """The draft's, if its proposer has one."""
    if settings.proposer == "model":
        yield from _check("draft", settings, PoolSize(settings.kv_tokens), running)


def _check(
    service: str, settings: TargetSettings | DraftSettings, pool: PoolSize, running: bool
) -> Iterator[Finding]:
    topic, model = f"{service} model", settings.model
    found = find(topic, model)
    if isinstance(found, Finding):
        yield found
        return
    folder, how = found
    try:
        config = ModelConfig.load(folder)
        parameters = sum(count_parameters(path) for path in weight_files(folder))
    except ModelError as error:
        yield problem(topic, str(error), "give another model, or fetch this one again")
        return
    yield ok(topic, f"{model}: {parameters / 1e6:.0f} M parameters, {how}")
    if running:
        yield ok(f"{service} memory", "taken: the service runs")
        return
    try:
        free = free_bytes_of(settings.device)
    except ModelError as error:
        yield problem(f"{service} device", str(error), f"set [{service}] device")
        return
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if settings.device == "cpu" and settings.kernels == "triton" and not interpreted:
        text = "Triton's kernels need a GPU, the device is cpu"
        yield problem(f"{service} kernels", text, f"set [{service}] kernels to auto, or device")
        return
    precision = choose_precision(settings.dtype, settings.device)
    kv_dtype = choose_kv_precision(settings.kv_dtype, precision)
    on_gpu = settings.device != "cpu" and settings.kernels != "torch"
    uses_triton = on_gpu or settings.kernels == "triton"
    if kv_dtype == "e4m3" and not uses_triton:
        text = "a cache in e4m3 needs Triton's kernels, on a GPU"
        yield problem(f"{service} memory", text, f"set [{service}] kv_dtype to auto or int8")
        return
    # Triton's have scales apart. A model that they do not fit has rows that are up to 3 % longer.
    per_block = block_bytes(config, BLOCK_SIZE, kv_dtype, scales_apart=uses_triton)
    yield _memory(service, config, parameters, pool, precision, per_block, free)


def free_bytes_of(device: str) -> int:
    """Free memory of the device; ModelError for one that cannot be used."""
    if device == "cpu":
        return free_host_bytes()
    try:
        from outrider.engine.device import free_bytes, parse_device
    except ImportError as error:
        raise ModelError(f"device {device} cannot be asked without torch") from error
    return free_bytes(parse_device(device))


def find(topic: str, model: str) -> tuple[Path, str] | Finding:
    """(its folder, how it was checked), or what is wrong. The order is that of `resolve`."""
    if model in catalogue.CATALOGUE:
        entry = catalogue.find(model)
        if store.is_complete(entry):
            return store.model_dir(model), "made from a file with the right hash, no file cut"
        state = "damaged or of an old format" if store.model_dir(model).exists() else "not here"
        return problem(topic, f"{model} is {state}", f"run: outrider models fetch {model}")
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve(), f"a folder, {path.resolve()}"
    if path.is_file() and path.suffix == ".gguf":
        with path.open("rb") as file:
            source = GgufSource(hashlib.file_digest(file, "sha256").hexdigest())
        if store.is_complete(source):
            return store.model_dir(source.name), "converted from GGUF, hash checked"
        return ok(topic, f"{path} is converted at the first start")
    hub_model = None if path.exists() else HubModel.parse(model)
    if hub_model is not None:
        return _find_in_hub_cache(topic, hub_model)
    advice = f"give a folder, a .gguf file, org/name, or one of: {', '.join(catalogue.CATALOGUE)}"
    return problem(topic, f"{model!r} is no model folder and no known name", advice)


def _find_in_hub_cache(topic: str, model: HubModel) -> tuple[Path, str] | Finding:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        text = f"{model}: the hub needs huggingface_hub"
        return problem(topic, text, "run: pip install 'outrider[hub]'")
    try:
        folder = huggingface_hub.snapshot_download(
            model.repository,
            revision=model.revision,
            allow_patterns=[*TOKENIZER_FILES, *WEIGHT_FILES],
            local_files_only=True,
        )
    except (errors.LocalEntryNotFoundError, OSError, ValueError):
        return warning(topic, f"{model} is not on this machine", "it is downloaded at the start")
    return Path(folder), "in huggingface_hub's cache"


def count_parameters(path: Path) -> int:
    """Numbers in a safetensors file, from its header. Raises ModelError for a cut file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 100_000_000)))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
        if path.stat().st_size < end:
            raise ModelError(f"{path} is cut: {path.stat().st_size} of {end} bytes")
        return sum(math.prod(entry["shape"]) for entry in tensors)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is not a whole safetensors file: {error}") from error


def _memory(
    service: str,
    config: ModelConfig,
    parameters: int,
    pool: PoolSize,
    precision: str,
    per_block: int,
    free: int,
) -> Finding:
    topic = f"{service} memory"
    head = config.vocab_size * config.hidden_size
    table = 0 if config.tied_head else head
    weights = math.ceil(
        (parameters - head - table) * WEIGHT_BYTES[precision]
        + head * HEAD_BYTES[precision]
        + table * TABLE_BYTES[precision]
    )
    advice = f"free memory, take a smaller model, or set [{service}] kv_tokens lower"
    if weights > free:
        text = f"the weights need {weights / MIB:.0f} MiB, {free / MIB:.0f} MiB are free"
        return problem(topic, text, advice)
    try:
        num_blocks = pool.num_blocks(per_block, BLOCK_SIZE, free - weights)
    except DoesNotFit as error:
        return problem(topic, f"behind {weights / MIB:.0f} MiB of weights {error}", advice)
    kept = f"{weights / MIB:.0f} MiB of weights in {precision}"
    if precision == EITHER:
        kept = f"at most {weights / MIB:.0f} MiB of weights, in int8 or losslessly in int4,"
    text = (
        f"{kept} and "
        f"{num_blocks * per_block / MIB:.0f} MiB of cache for {num_blocks * BLOCK_SIZE} tokens; "
        f"{free / MIB:.0f} MiB are free"
    )
    if weights + num_blocks * per_block > 0.9 * free:
        return warning(topic, text, advice)
    return ok(topic, text)

"""The decoder against transformers, on tiny random checkpoints and on the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.batch import Batch, BatchItem
from outrider.engine.config import ModelConfig, ModelError
from outrider.engine.model import LlamaModel
from outrider.engine.runner import Runner
from tests.support.kernels import are_interpreted
from tests.support.tiny_models import EOS_TOKEN_ID, make_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied-biased": {"tied_head": False, "attention_bias": True, "mlp_bias": True},
    "llama-one-kv-head": {
        "hidden_size": 48,
        "heads": 3,
        "kv_heads": 1,
        "head_dim": 32,
        "vocab_size": 515,
    },
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"arch": "mistral", "sliding_window": None, "head_dim": 24},
    "qwen2": {"arch": "qwen2", "hidden_size": 56, "heads": 7, "kv_heads": 1},
    "qwen2-untied": {"arch": "qwen2", "tied_head": False},
    "qwen3": {"arch": "qwen3", "head_dim": 24},
    "qwen3-untied-default-head": {"arch": "qwen3", "tied_head": False, "head_dim": 128},
    "qwen3-biased": {"arch": "qwen3", "head_dim": 32, "attention_bias": True},
}


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' float32 logits of every position."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def our_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """The engine's logits of every position."""
    num_blocks = len(token_ids) // 16 + 1
    runner = Runner(LlamaModel.load(folder), num_blocks)
    table = list(reversed(range(num_blocks)))
    return runner.forward(Batch([BatchItem(token_ids, 0, table, len(token_ids))]))


def assert_agree(folder: Path, token_ids: list[int]) -> None:
    """Within 1e-4 of the largest |logit|."""
    expected = reference_logits(folder, token_ids)
    error = (our_logits(folder, token_ids) - expected).abs().max()
    assert error <= 1e-4 * expected.abs().max()


@pytest.mark.timeout(120)  # the first imports transformers
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_transformers(tmp_path: Path, variant: str) -> None:
    """Every supported shape gives transformers' logits, over more than one chunk of keys."""
    folder = make_tiny_model(tmp_path, **VARIANTS[variant])
    generator = torch.Generator().manual_seed(3)
    num_tokens = 24 if are_interpreted() else 200
    assert_agree(folder, torch.randint(0, 384, (num_tokens,), generator=generator).tolist())


@pytest.mark.timeout(120)
def test_logits_of_the_real_model_agree_with_transformers(smollm2_folder: Path) -> None:
    """SmolLM2 on a chat prompt."""
    token_ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert_agree(smollm2_folder, token_ids * 3)


def test_sharded_checkpoint_equals_the_single_file(tmp_path: Path) -> None:
    """Shards with an index load to the same logits."""
    from transformers import AutoModelForCausalLM

    whole = make_tiny_model(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    token_ids = list(range(20, 40))
    assert torch.equal(our_logits(whole, token_ids), our_logits(tmp_path / "sharded", token_ids))


def test_config_needs_no_torch_and_knows_eos(tmp_path: Path) -> None:
    """eos ids come from generation_config.json first, then from config.json."""
    folder = make_tiny_model(tmp_path)
    assert ModelConfig.load(folder).eos_token_ids == (EOS_TOKEN_ID,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert ModelConfig.load(folder).eos_token_ids == (3, 7)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"quantization_config": {"quant_method": "gptq"}}, "GPTQ checkpoints .* only .*GGUF"),
        ({"quantization_config": {"quant_method": "awq"}}, "AWQ"),
        ({"quantization_config": {"quant_method": "fp8"}}, "FP8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "COMPRESSED-TENSORS"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "mixture of experts"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}, "Qwen3Moe.* mixture"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding window of 64"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding window of 64"),
        ({"num_key_value_heads": 3}, "4 heads do not divide among 3 key/value heads"),
        ({"head_dim": 15}, "heads of 15 values"),
        ({"hidden_size": None}, "config.json"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """The error names the file and the thing that is not supported."""
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=reason) as caught:
        LlamaModel.load(folder)
    assert "config.json" in str(caught.value)


def test_a_window_that_is_switched_off_is_fine(tmp_path: Path) -> None:
    """Qwen2 folders name a window that is not used; one as long as the context hides nothing."""
    folder = make_tiny_model(tmp_path, arch="qwen2")
    config = json.loads((folder / "config.json").read_text())
    for change in (
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 512, "layer_types": None},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        assert ModelConfig.load(folder).architecture == "Qwen2ForCausalLM"


def test_a_mistral_that_says_nothing_has_a_window(tmp_path: Path) -> None:
    """transformers assumes 4096 tokens where the key is missing: a longer context is refused."""
    folder = make_tiny_model(tmp_path, arch="mistral", sliding_window=None)
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    assert ModelConfig.load(folder).max_model_len == 512
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    with pytest.raises(ModelError, match="sliding window of 4096"):
        ModelConfig.load(folder)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    """No folder, no weights, half a file, missing and surplus tensors: a ModelError each."""
    from safetensors.torch import load_file, save_file

    with pytest.raises(ModelError, match=r"config\.json"):
        LlamaModel.load(tmp_path / "nowhere")
    folder = make_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        LlamaModel.load(folder)
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(4)}, weights)
    with pytest.raises(ModelError, match="q_norm"):
        LlamaModel.load(folder)
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, weights)
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        LlamaModel.load(folder)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        save_file({**tensors, "model.norm.weight": torch.ones(64).to(dtype)}, weights)
        with pytest.raises(ModelError, match="quantised"):
            LlamaModel.load(folder)
    weights.unlink()
    with pytest.raises(ModelError, match="safetensors"):
        LlamaModel.load(folder)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, dtype: str, name: str) -> None:
    """A dimension too long or too short, turned round, one too many or too few: both shapes."""
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(
        tmp_path / "model", arch="qwen3", head_dim=24, attention_bias=True, tied_head=False
    )
    weights = folder / "model.safetensors"
    whole = {each: tensor.clone() for each, tensor in load_file(weights).items()}
    right = list(whole[name].shape)
    wrongs = [[*right, 1], [whole[name].numel()], [], right[::-1]]
    for i, size in enumerate(right):
        wrongs += [[*right[:i], other, *right[i + 1 :]] for other in (size - 1, size + 1)]
    for wrong in wrongs:
        if wrong == right:
            continue
        save_file({**whole, name: torch.zeros(wrong)}, weights)
        with pytest.raises(ModelError) as caught:
            LlamaModel.load(folder, dtype)
        assert str(caught.value) == f"{name} is {wrong}, expected {right}"

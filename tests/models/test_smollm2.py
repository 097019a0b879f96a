"""The facts that the fetched model must have, whatever its GGUF says or leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path):
    """The converted tokenizer as transformers loads it."""
    return transformers.AutoTokenizer.from_pretrained(smollm2_folder)


def test_ids_of_the_special_tokens(tokenizer) -> None:
    """The vocabulary's size and the ids that templates and stopping rely on."""
    assert len(tokenizer) == 49_152
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_the_tokenizer_adds_nothing(tokenizer) -> None:
    """No BOS, no prefix space; special tokens in the text are single ids; digits stand alone."""
    assert tokenizer("Hello").input_ids == [19556]
    assert tokenizer("<|im_start|>user").input_ids[0] == 1
    assert tokenizer.convert_ids_to_tokens(tokenizer("1234").input_ids) == list("1234")


@pytest.mark.parametrize(
    "text", ["plain words", "  indents\n\tand tabs\r\n", "wörld 한국어 🙂", "a\x00b", "x�y"]
)
def test_decoding_gives_the_text_back(tokenizer, text: str) -> None:
    """encode then decode is the identity, byte for byte."""
    assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text


def test_the_template_adds_a_system_turn(tokenizer) -> None:
    """A chat without a system turn gets the model's default one; a given one stays alone."""
    ask = {"role": "user", "content": "Hi"}
    plain = tokenizer.apply_chat_template([ask], tokenize=False, add_generation_prompt=True)
    assert plain.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert plain.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    own = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, ask], tokenize=False
    )
    assert own.count("<|im_start|>system") == 1 and "SmolLM" not in own


def test_the_configuration_is_the_published_one(smollm2_folder: Path) -> None:
    """The shape, the context and the single id that ends an answer."""
    config = json.loads((smollm2_folder / "config.json").read_text())
    wanted = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    }
    assert {key: config[key] for key in wanted} == wanted
    generation = json.loads((smollm2_folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2

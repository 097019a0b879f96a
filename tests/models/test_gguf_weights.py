"""Names and layouts of converted weights."""

from __future__ import annotations

import pytest

from outrider.models.errors import FetchFailed
from outrider.models.gguf_weights import hf_name, unpermute

np = pytest.importorskip("numpy")


def test_unpermute_undoes_the_rotary_interleave() -> None:
    """A matrix permuted the way GGUF writers do comes back as it was, for every head count."""
    for num_heads in (1, 3, 9):
        weight = np.arange(num_heads * 64 * 5, dtype=np.float32).reshape(num_heads * 64, 5)
        halves = weight.reshape(num_heads, 2, 32, 5)
        permuted = halves.swapaxes(1, 2).reshape(weight.shape)
        assert np.array_equal(unpermute(permuted, num_heads), weight)


def test_tensor_names() -> None:
    """Every kind of tensor has a published name; an unknown one is refused by name."""
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    with pytest.raises(FetchFailed, match=r"blk\.0\.ssm_in\.weight"):
        hf_name("blk.0.ssm_in.weight")

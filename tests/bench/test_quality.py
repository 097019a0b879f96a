"""What int8 may cost on SmolLM2's own chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.quality import measure


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_int8_keeps_the_quality_of_bfloat16(smollm2_folder: Path) -> None:
    """On 20,000 sampled tokens: perplexity at most 1 % above bfloat16's, 96 of 100 best tokens
    float32's, and at most 1.4 bytes for each parameter."""
    num_tokens, found = measure(smollm2_folder, 20_000, ("bfloat16", "int8"))
    print(num_tokens, found)
    int8 = found["int8"]
    assert num_tokens >= 20_000
    assert int8.perplexity <= 1.01 * found["bfloat16"].perplexity
    assert int8.best_token_agreement >= 0.96
    assert int8.bytes_a_parameter <= 1.4

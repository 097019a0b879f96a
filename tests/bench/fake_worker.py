"""A worker without an engine: `fake_worker.py TOKENS_PER_S`, or `fake_worker.py ends`."""

from __future__ import annotations

import sys

from bench.peers.lines import Answer, Ask, serve


def load() -> tuple[str, Ask]:
    """Says that it was as fast as it is told, however long it took."""
    speed = float(sys.argv[1])

    def ask(prompts: list[list[int]], num_tokens: int) -> Answer:
        print("what a library prints is no answer")
        texts = [[prompt[0]] * num_tokens for prompt in prompts]
        if prompts[0][0] == 0:
            texts[0].pop()
        return Answer(len(prompts) * num_tokens / speed, 0.1 * num_tokens / speed, texts)

    return f"fake {speed:g}", ask


if sys.argv[1] == "ends":
    sys.exit("it cannot run here")
serve(load)

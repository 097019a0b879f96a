"""OpenVINO GenAI with a GGUF: its pipeline for one prompt, its continuous batching for several.

Runs in an environment of its own:

    python -m bench.peers.worker_openvino FILE.gguf THREADS one|many
"""

from __future__ import annotations

import sys
import time

import numpy as np
import openvino
import openvino_genai as genai

from bench.peers.lines import Answer, Ask, serve

CACHE_GB = 1


def load() -> tuple[str, Ask]:
    """The pipeline that the last argument names."""
    gguf, threads, mode = sys.argv[1:]
    name = f"openvino-genai {genai.__version__}"
    if mode == "one":
        return name, _one(genai.LLMPipeline(gguf, "CPU", INFERENCE_NUM_THREADS=int(threads)))
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    properties = {"INFERENCE_NUM_THREADS": int(threads)}
    return name, _many(genai.ContinuousBatchingPipeline(gguf, scheduling, "CPU", properties))


def _one(pipeline: genai.LLMPipeline) -> Ask:
    def ask(prompts: list[list[int]], num_tokens: int) -> Answer:
        (prompt,) = prompts
        began = time.perf_counter()
        result = pipeline.generate(_tensor(prompt), _config(num_tokens))
        seconds = time.perf_counter() - began
        return Answer(seconds, result.perf_metrics.get_ttft().mean / 1000, result.tokens)

    return ask


def _many(pipeline: genai.ContinuousBatchingPipeline) -> Ask:
    def ask(prompts: list[list[int]], num_tokens: int) -> Answer:
        began = time.perf_counter()
        inputs = [_tensor(prompt) for prompt in prompts]
        results = pipeline.generate(inputs, [_config(num_tokens)] * len(inputs))
        seconds = time.perf_counter() - began
        return Answer(seconds, None, [list(each.m_generation_ids[0]) for each in results])

    return ask


def _tensor(ids: list[int]) -> openvino.Tensor:
    return openvino.Tensor(np.array([ids], dtype=np.int64))


def _config(num_tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(load)

"""Keys and values in int8: near float32, and as independent of company as everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import model_factory
from fastserve import LLM, SamplingParams
from fastserve.models.resolve import resolve
from fastserve.runner import CpuRunner
from plans import PlanBuilder, drive

LENGTHS = (1, 15, 17, 70, 200)

MOST = 0.05
"""Of the spread of the logits: what int8 may move them by on average. A key or value moves by up to
1/254 of its head's largest number (which biases make larger for all); some of it cancels out in
sums, and three layers add theirs."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, model_factory.VOCAB_SIZE, length).tolist() for length in LENGTHS]


def logits(folder: Path, chunk: int, **how: Any) -> list[np.ndarray]:
    runner = CpuRunner.load(resolve(folder), num_threads=1, **how)
    builder = PlanBuilder(block_size=16, num_blocks=64)
    return drive(runner, builder, prompts(), lambda step, sequence: chunk)


@pytest.mark.parametrize("name", model_factory.VARIANTS)
def test_logits_are_near_transformers(name: str, models: Path) -> None:
    folder = model_factory.make(name, models)
    model = model_factory.reference(folder)
    with torch.inference_mode():
        want = [model(torch.tensor([tokens])).logits[0].numpy() for tokens in prompts()]
    got = logits(folder, 7, dtype="float32", kv_cache_dtype="int8")
    for ours, theirs in zip(got, want, strict=True):
        off = np.sqrt(np.mean((ours - theirs) ** 2)) / theirs.std()
        assert off < MOST, f"{len(theirs)} tokens: off by {off}"
    exact = logits(folder, 7, dtype="float32")
    assert not np.array_equal(got[-1], exact[-1]), "the option does something"
    whole = logits(folder, 512, dtype="float32", kv_cache_dtype="int8")
    for chunked, one in zip(got, whole, strict=True):
        assert np.array_equal(chunked, one), "a chunk reads keys and values as stored, its own too"


def test_beside_bfloat16(models: Path) -> None:
    """int8 adds little to what bfloat16 moves."""
    folder = model_factory.make("qwen3", models)
    exact = logits(folder, 7, dtype="float32")

    def off(stored: str) -> float:
        got = logits(folder, 7, dtype="bfloat16", kv_cache_dtype=stored)
        return float(
            np.sqrt(np.mean(np.concatenate([a - b for a, b in zip(got, exact, strict=True)]) ** 2))
        )

    spread = float(np.concatenate(exact).std())
    assert off("int8") < off("float32") + MOST * spread


def test_forks_copy_scales_with_their_block(models: Path) -> None:
    """Two sequences of one request share a prompt that ends within a block. Each one's log
    probabilities have the bits that its tokens have as a prompt, computed from nothing."""
    folder = model_factory.make("llama", models)
    rng = np.random.default_rng(8)
    lengths = (5, 21, 40, 47, 33)
    given = [rng.integers(3, model_factory.VOCAB_SIZE, length).tolist() for length in lengths]
    how = {"dtype": "float32", "kv_cache_dtype": "int8", "num_blocks": 64, "num_threads": 1}
    params = SamplingParams(
        n=2, temperature=1.0, seed=5, max_tokens=20, logprobs=0, ignore_eos=True
    )
    with LLM(str(folder), **how) as llm:
        outputs = llm.generate(given, params, progress=False)
        assert llm.stats()["num_copied_blocks"] >= len(given), "one copy a fork"
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), **how, enable_prefix_caching=False) as llm:
        for prompt, output in zip(given, outputs, strict=True):
            tokens = [sequence.token_ids for sequence in output.outputs]
            assert tokens[0] != tokens[1]
            for sequence in output.outputs:
                whole = prompt + sequence.token_ids
                [again] = llm.generate([whole], scored, progress=False)
                want = [
                    entry[token].logprob.hex()
                    for entry, token in zip(
                        again.prompt_logprobs[len(prompt) :], sequence.token_ids, strict=True
                    )
                ]
                got = [
                    entry[token].logprob.hex()
                    for entry, token in zip(sequence.logprobs, sequence.token_ids, strict=True)
                ]
                assert got == want

"""An answer does not depend on its company: tokens and log-probabilities, compared as bits.

What the README promises. One small Llama, also quantised, also with keys and values in int8; and
for every way of running it the same requests: alone, together, in chunks of any size, with the
cache cold, warm and off, with a pool so small that they preempt each other, several steps in
flight, and any number of threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import gguf_factory
import model_factory
from fastserve import LLM, SamplingParams
from fastserve.models.native import NativeDecoder
from fastserve.runner import CpuRunner

NUM_REQUESTS = 200
LONGEST = 96

DEFAULTS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_blocks": 400}
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "two threads": {"num_threads": 2},
    "token by token": {"max_num_batched_tokens": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 64": {"max_chunk_tokens": 64, "max_num_batched_tokens": 512},
    "no cache": {"enable_prefix_caching": False},
    "blocks of 8": {"block_size": 8},
    "preempted": {"num_blocks": 10, "enable_prefix_caching": False},
    "preempted, cached": {"num_blocks": 10},
    "two steps in flight": {"max_num_steps_in_flight": 2},
}


class Model(NamedTuple):
    """Where it is, and how it is loaded."""

    path: Path
    options: dict[str, Any]


OPTIONS: dict[str, dict[str, Any]] = {
    "F32": {},
    "Q4_1": {"dtype": "auto"},
    "int8": {"quantization": "int8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module", params=OPTIONS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """As float32, as a quantised file that stays quantised in memory, and quantised when loaded or
    where keys and values are kept.
    """
    at = tmp_path_factory.mktemp("bits")
    path = model_factory.make("llama", at)
    if request.param == "Q4_1":
        path = gguf_factory.convert(path, at / "model.gguf", request.param)
    return Model(path, DEFAULTS | OPTIONS[request.param])


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, and every kind of sampling."""
    rng = np.random.default_rng(11)
    documents = rng.integers(3, model_factory.VOCAB_SIZE, (5, LONGEST)).tolist()
    prompts, params = [], []
    for number in range(NUM_REQUESTS):
        length, kept = rng.integers(1, LONGEST, 2)
        own = rng.integers(3, model_factory.VOCAB_SIZE, LONGEST).tolist()
        prompts.append((documents[rng.integers(5)][:kept] + own)[:length])
        params.append(
            SamplingParams(
                max_tokens=int(rng.integers(1, 30)),
                temperature=float(rng.choice([0.0, 0.7, 1.3])),
                top_p=float(rng.choice([1.0, 0.9])),
                seed=number,
                logprobs=2,
                ignore_eos=True,
            )
        )
    return prompts, params


def bits(outputs: list[Any]) -> list[Any]:
    """Tokens, and their log-probabilities as the floats' own bits."""
    return [
        [
            (token, [(other, found.logprob.hex()) for other, found in sorted(beside.items())])
            for token, beside in zip(
                output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
            )
        ]
        for output in outputs
    ]


def run(model: Model, prompts: list[Any], params: list[Any], **how: Any) -> tuple[list[Any], Any]:
    with LLM(model.path, **(model.options | {"num_threads": 1} | how)) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        again = llm.generate(prompts[:20], params[:20], progress=False)
        assert bits(again) == bits(outputs[:20]), "the same from the cache"
        stats = llm.stats()
        assert stats["free"] + stats["cached"] == stats["capacity"]
    return bits(outputs), stats


def test_in_any_company(model: Model) -> None:
    prompts, params = requests()
    options = model.options | {"num_threads": 1, "enable_prefix_caching": False}
    with LLM(model.path, **options) as llm:
        alone = [
            bits(llm.generate([prompt], [how], progress=False))[0]
            for prompt, how in zip(prompts, params, strict=True)
        ]
    for name, how in WAYS.items():
        got, stats = run(model, prompts, params, **how)
        for number, (ours, want) in enumerate(zip(got, alone, strict=True)):
            assert ours == want, f"{name}: request {number}"
        if "preempted" in name:
            assert stats["num_preemptions"] >= 20, name
        if how.get("enable_prefix_caching", True):
            assert stats["prefix_cache_hits"] > 0, name


def test_a_long_beginning_is_attended_together(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that share more than the kernels' 256 keys are computed in one tile over these."""
    rng = np.random.default_rng(12)
    beginning = rng.integers(3, model_factory.VOCAB_SIZE, 330).tolist()
    own = rng.integers(3, model_factory.VOCAB_SIZE, (24, 60)).tolist()
    prompts = [
        beginning[: 330 - number % 5 * 15] + tokens[: 1 + 2 * number]
        for number, tokens in enumerate(own)
    ]
    params = [
        SamplingParams(max_tokens=25, temperature=0.8, seed=number, logprobs=2, ignore_eos=True)
        for number in range(24)
    ]
    alone = [run(model, [prompt], [how])[0][0] for prompt, how in zip(prompts, params, strict=True)]
    shared = []
    forward = NativeDecoder.forward

    def watched(self: Any, plan: Any, *arguments: Any) -> Any:
        shared.extend(plan.num_shared_blocks.tolist())
        return forward(self, plan, *arguments)

    monkeypatch.setattr(NativeDecoder, "forward", watched)
    # The loop in Python, where a step's plan can be seen.
    monkeypatch.setattr(CpuRunner, "native_parts", lambda self: None)
    for block_size, num_threads in ((8, 1), (16, 2), (32, 2)):
        how = {"block_size": block_size, "num_threads": num_threads, "num_blocks": 800}
        shared.clear()
        assert run(model, prompts, params, **how)[0] == alone, how
        assert sum(num * block_size >= 256 for num in shared) > 100, how

"""SmolLM2 answers as transformers does, under each condition once beside the defaults.

The prompts are stretches of the licence's text, 1 to 1,500 tokens long, around the ends of blocks,
some with the same beginning. Budgets and chunks of 1 and 7 tokens get eight short ones. Everything
is float32, and transformers reads the same file.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fastserve.config import EngineConfig
from fastserve.engine import Engine
from fastserve.models.resolve import resolve
from fastserve.runner import CpuRunner
from fastserve.text.tokenizer import Tokenizer
from greedy import MAX_TIES, TALLIES, Reference, Tally, run_round

NAME = "SmolLM2"
MAX_TOKENS = 8
NUM_SHORT = 8
MIN_PREEMPTIONS = 20
MAX_ROUNDS = 4
LENGTHS = (
    *range(1, 15),
    *(k * 16 + more for k in range(1, 7) for more in (-1, 0, 1)),
    *range(19, 71, 2),
    *(127, 128, 129, 200, 400, 1500),
)

SHORT = {
    "budget 1": {"max_num_batched_tokens": 1},
    "budget 7": {"max_num_batched_tokens": 7},
    "chunk 1": {"max_chunk_tokens": 1},
    "chunk 7": {"max_chunk_tokens": 7},
}
LONG: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one by one": {},
    "budget 16": {"max_num_batched_tokens": 16},
    "budget 64": {"max_num_batched_tokens": 64},
    "budget 512": {"max_num_batched_tokens": 512},
    "chunk 16": {"max_chunk_tokens": 16},
    "chunk 64": {"max_chunk_tokens": 64},
    "chunk 512": {"max_chunk_tokens": 512},
    "no prefix cache": {"enable_prefix_caching": False},
    "repeated": {},
    "small pool": {"num_blocks": 96},
    "priorities": {"scheduling_policy": "priority", "max_num_seqs": 8},
    "aborts": {"max_num_seqs": 16},
    "blocks of 8": {"block_size": 8},
    "blocks of 32": {"block_size": 32},
    "two steps in flight": {"max_num_steps_in_flight": 2},
}


@pytest.fixture(scope="module")
def loaded() -> CpuRunner:
    return CpuRunner.load(resolve("smollm2"), dtype="float32")


@pytest.fixture(scope="module")
def prompts(repository: Path) -> list[list[int]]:
    tokens = Tokenizer.from_source(resolve("smollm2")).encode((repository / "LICENSE").read_text())
    starts = (0, 0, 211, 0, 433, 801)
    return [tokens[starts[number % 6] :][:length] for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def reference(loaded: CpuRunner, prompts: list[list[int]]) -> Reference:
    path = resolve("smollm2").path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    reference = Reference(model.eval(), loaded.config.eos_token_ids, NAME)
    reference.learn(prompts, MAX_TOKENS)
    return reference


def engine_for(loaded: CpuRunner, **limits: Any) -> Engine:
    runner = CpuRunner(loaded.config, loaded.weights, loaded.pool, loaded.kv_dtype)
    limits = {"num_blocks": 12_800 // limits.get("block_size", 16), "max_model_len": 1536} | limits
    return Engine(runner, None, EngineConfig(**limits))


def test_the_prompts_are_what_they_should_be(prompts: list[list[int]]) -> None:
    assert len(prompts) == 64
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    assert min(LENGTHS) == 1
    assert max(LENGTHS) == 1500


@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_greedy_answers_equal_transformers(
    loaded: CpuRunner, reference: Reference, prompts: list[list[int]], name: str
) -> None:
    engine = engine_for(loaded, **(SHORT | LONG)[name])
    if name in SHORT:
        prompts = prompts[:NUM_SHORT]
    elif name == "small pool":
        prompts = prompts[::-1]  # The longest first, so that it takes nearly all of the pool.
    order = random.Random(name)
    priorities = None
    if name == "priorities":
        prompts = order.sample(prompts, len(prompts))
        priorities = [order.randrange(5) for _ in prompts]
    for number in range(MAX_ROUNDS):
        outputs = run_round(
            engine,
            reference,
            prompts,
            MAX_TOKENS,
            one_by_one=name == "one by one",
            priorities=priorities,
            aborts=0 if name == "aborts" else None,
            where=name,
        )
        stats = engine.stats()
        if name == "small pool" and stats["num_preemptions"] < MIN_PREEMPTIONS:
            engine.reset_prefix_cache()
        elif name != "repeated" or number > 0:
            break
    if name == "small pool":
        assert stats["num_preemptions"] >= MIN_PREEMPTIONS
    elif name == "repeated":
        cached = sum(output.num_cached_tokens for output in outputs)
        assert cached > sum(map(len, prompts)) // 2
    elif name == "no prefix cache":
        assert stats["prefix_cache_hits"] == 0
    elif name == "aborts":
        assert stats["num_finished_abort"] >= 10
    engine.shutdown()


def test_ties_are_rare() -> None:
    tally = TALLIES.get(NAME, Tally())
    assert len(tally.ties) <= tally.num_tokens * MAX_TIES

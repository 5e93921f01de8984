"""What a step takes is measured, and prompts beside streams are limited to it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import model_factory
from engines import ToyEngines, run_all
from fastserve import AsyncEngine, SamplingParams, costs
from fastserve.arena import PlanView
from fastserve.config import EngineConfig
from fastserve.costs import StepCosts, measure
from fastserve.errors import ConfigError
from fastserve.llm import LLM
from fastserve.models.resolve import resolve
from fastserve.runner import CpuRunner
from fastserve.sizing import core_keywords
from toy_runner import ToyRunner

PER_STEP, PER_TOKEN, PER_CONTEXT = 7_000, 500, 2
LIMITED = StepCosts(step_ns=1e6, token_ns=1e6, context_ns=1e4)


class Layer:
    """A layer that takes a known time, by a clock of its own. Some steps are disturbed."""

    vocab_size = 10

    def __init__(self, max_positions: int) -> None:
        self.config = SimpleNamespace(max_positions=max_positions)
        self.now = 0
        self.num_forwards = 0

    def allocate_kv(self, num_blocks: int, block_size: int, block_tables: Any) -> None:
        self.capacity = num_blocks * block_size
        assert block_tables.shape[1] * block_size >= self.capacity

    def forward(self, plan: PlanView, last_samples: Any) -> None:
        self.num_forwards += 1
        assert plan.num_tokens >= 1
        assert plan.slot_mapping.max() < self.capacity
        disturbance = 10**9 if self.num_forwards % 3 else 0
        self.now += PER_STEP + disturbance
        self.now += PER_TOKEN * plan.num_tokens + PER_CONTEXT * int(plan.positions.sum())


@pytest.mark.parametrize("max_positions", [2, 3, 17, 32, 33, 34, 64, 65, 100, 1056, 1057, 10**6])
def test_measuring_finds_what_a_layer_takes(max_positions, monkeypatch):
    layer = Layer(max_positions)
    monkeypatch.setattr(costs.time, "perf_counter_ns", lambda: layer.now)
    found = measure(layer, num_layers=30, weight_ratio=4.0)
    chunk = min(32, max_positions - 1)
    inner = PER_CONTEXT * sum(range(chunk))
    assert found.token_ns == 30 * (PER_STEP + PER_TOKEN * chunk + inner) / chunk
    has_context = max_positions > 64
    assert found.context_ns == (30 * PER_CONTEXT if has_context else 0)
    last = min((max_positions - 1) // 32 * 32 or max_positions - 1, 1056)
    assert found.step_ns == 4 * (PER_STEP + PER_TOKEN + PER_CONTEXT * last)


@pytest.mark.parametrize(
    ("target_ms", "want"), [(90.0, 88), (65.5, 64), (10.0, 64), (0.0, 64), (1e9, 10**9 - 2)]
)
def test_a_target_is_so_many_tokens(target_ms, want):
    two_ms = StepCosts(step_ns=2e6, token_ns=1e6, context_ns=0.0)
    assert two_ms.max_prefill_tokens(target_ms) == want


@pytest.mark.parametrize(
    ("token_ns", "context_ns", "want"),
    [(1e6, 500.0, 2000), (1.0, 50.0, 1), (1e6, 0.0, 1 << 24), (1e6, 1e-9, 1 << 24)],
)
def test_context_weighs_as_it_was_measured(token_ns, context_ns, want):
    measured = StepCosts(step_ns=1.0, token_ns=token_ns, context_ns=context_ns)
    assert measured.context_per_token == want


def test_the_core_is_told():
    sizes: dict[str, Any] = {"max_positions": 64, "vocab_size": 9, "kv_bytes_per_block": 64}
    keywords = core_keywords(EngineConfig(target_itl_ms=90), costs=LIMITED, **sizes)
    assert keywords["max_num_mixed_prefill_tokens"] == 89
    assert keywords["context_per_token"] == 100
    for config, measured in [(EngineConfig(target_itl_ms=None), LIMITED), (EngineConfig(), None)]:
        keywords = core_keywords(config, costs=measured, **sizes)
        assert not {"max_num_mixed_prefill_tokens", "context_per_token"} & keywords.keys()


class MeasuredRunner(ToyRunner):
    """Takes what :data:`LIMITED` says, and notes what each step holds."""

    def __init__(self) -> None:
        super().__init__(max_positions=512)
        self.chunks: list[list[tuple[int, int]]] = []
        self.on_forward = self.note

    def step_costs(self) -> StepCosts:
        return LIMITED

    def note(self, plan: PlanView) -> None:
        starts = plan.positions[plan.query_indptr[:-1]].tolist()
        self.chunks.append(list(zip(starts, np.diff(plan.query_indptr).tolist(), strict=True)))


@pytest.fixture
def toy_engines():
    engines = ToyEngines()
    yield engines
    for engine in engines.made:
        engine.shutdown()


def test_a_long_prompt_leaves_streams_their_pace(toy_engines, caplog):
    runner = MeasuredRunner()
    with caplog.at_level(logging.INFO, "fastserve.engine"):
        engine = toy_engines(runner, max_num_batched_tokens=300, target_itl_ms=81.0)
    assert "up to 80 prompt tokens" in caplog.text
    stream = engine.submit([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
    engine.step()
    engine.submit([9] * 400, SamplingParams(max_tokens=2))
    run_all(engine)
    beside = [step for step in runner.chunks if len(step) == 2 and step[1][1] > 1]
    sizes = [step[1] for step in beside]
    assert sum(size for _, size in sizes) == 400
    # Sums of 1 + position / 100, to 80 at most, computed one token at a time.
    start = 0
    for got_start, got in sizes[:-1]:
        weight, want = 0, 0
        while weight + 100 + start + want <= 8000:
            weight += 100 + start + want
            want += 1
        assert (got_start, got) == (start, want)
        start += want
    assert sizes[0][1] > 2 * sizes[-2][1]
    assert all(step[0][1] == 1 for step in beside), "the stream has a token in each"
    assert len(stream.output().outputs[0].token_ids) == 60


def test_nobody_streams_and_a_prompt_has_the_step(toy_engines):
    runner = MeasuredRunner()
    engine = toy_engines(runner, max_num_batched_tokens=300, target_itl_ms=41.0)
    engine.submit([9] * 200, SamplingParams(max_tokens=1))
    run_all(engine)
    # 165 tokens would weigh 165 + (0 + ... + 164) / 100 = 300.3.
    assert [size for step in runner.chunks for _, size in step] == [164, 36]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_factory.make("qwen3", tmp_path_factory.mktemp("models"))


def test_a_model_on_this_machine(folder):
    runner = CpuRunner.load(resolve(folder), num_threads=2)
    measured = runner.step_costs()
    assert measured is not None
    assert measured.step_ns > 0
    assert measured.token_ns >= 1
    assert measured.context_ns >= 0
    with pytest.raises(RuntimeError, match="allocate_kv comes before"):
        runner.forward(None, np.zeros(1, np.int32))  # type: ignore[arg-type]


def test_a_model_without_room_for_a_step_is_not_measured(folder):
    runner = CpuRunner.load(resolve(folder), num_threads=1)
    for max_positions, is_measured in [(1, False), (2, True)]:
        runner.config = dataclasses.replace(runner.config, max_positions=max_positions)
        assert (runner.step_costs() is not None) == is_measured


def test_streams_are_looked_after_and_batches_are_not(folder):
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_blocks": 64, "num_threads": 1}
    with LLM(folder, **options) as llm:
        assert llm.engine.core_config["max_num_mixed_prefill_tokens"] is None
    with LLM(folder, target_itl_ms=1e9, **options) as llm:
        assert llm.engine.core_config["max_num_mixed_prefill_tokens"] > 64
    with AsyncEngine(folder, **options) as streaming:
        limits = streaming._engine.core_config
        assert limits["max_num_mixed_prefill_tokens"] >= 64
        assert limits["context_per_token"] >= 1


@pytest.mark.parametrize("value", [-1, float("nan"), "60", True, 1e10])
def test_a_target_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match=r"target_itl_ms=.*want 0 to 1e9 milliseconds, or None"):
        EngineConfig(target_itl_ms=value)

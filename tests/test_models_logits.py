"""Logits of every architecture, position by position, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import model_factory
from fastserve.models.resolve import resolve
from fastserve.runner import CpuRunner
from plans import PlanBuilder, Row, drive

BLOCK_SIZE = 16
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 70)
SCHEDULES = {
    "whole": lambda step, sequence: 100,
    "one by one": lambda step, sequence: 1,
    "chunks": lambda step, sequence: 7,
    "mixed": lambda step, sequence: (0, 1, 5, 16, 1, 23)[(step + 2 * sequence) % 6],
}


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model_factory.VOCAB_SIZE, length).tolist() for length in LENGTHS]


def load(folder: Path, dtype: str = "float32") -> CpuRunner:
    return CpuRunner.load(resolve(folder), dtype=dtype, num_threads=1)


@torch.inference_mode()
def expected(folder: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    model = model_factory.reference(folder)
    return [model(torch.tensor([tokens])).logits[0].numpy() for tokens in sequences]


@pytest.mark.parametrize("name", model_factory.VARIANTS)
def test_logits_equal_transformers(name, models):
    folder = model_factory.make(name, models)
    sequences = prompts()
    want = expected(folder, sequences)
    runner = load(folder)
    for schedule, chunk_of in SCHEDULES.items():
        builder = PlanBuilder(block_size=BLOCK_SIZE)
        got = drive(runner, builder, sequences, chunk_of)
        for tokens, ours, theirs in zip(sequences, got, want, strict=True):
            error = np.abs(ours - theirs).max()
            assert error < 1e-4, f"{schedule}, {len(tokens)} tokens: off by {error}"
            assert np.abs(theirs).max() > 1.0, "logits too small to tell a mistake"


@pytest.mark.parametrize("block_size", [8, 32])
def test_block_size_does_not_matter(block_size, models):
    folder = model_factory.make("mistral", models)
    sequences = prompts()
    builder = PlanBuilder(block_size=block_size, num_blocks=128)
    got = drive(load(folder), builder, sequences, SCHEDULES["mixed"])
    for ours, theirs in zip(got, expected(folder, sequences), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_is_near(name, models):
    folder = model_factory.make(name, models)
    sequences = prompts()
    model = model_factory.reference(folder).to(torch.bfloat16)
    with torch.inference_mode():
        theirs16 = [model(torch.tensor([s])).logits[0].float().numpy() for s in sequences]
    exact = expected(folder, sequences)
    got = drive(load(folder, "bfloat16"), PlanBuilder(), sequences, SCHEDULES["chunks"])
    for ours, theirs, truth in zip(got, theirs16, exact, strict=True):
        spread = np.sqrt(np.mean((theirs - truth) ** 2))
        ours_off = np.sqrt(np.mean((ours - truth) ** 2))
        assert ours_off < 1.5 * spread + 0.01, f"{ours_off} from float32, transformers {spread}"


def test_greedy_tokens_equal_transformers(models):
    """Every next token stands as −1 − slot in the plan and is taken from the last samples."""
    folder = model_factory.make("qwen3", models)
    runner = load(folder)
    sequences = prompts(seed=5)
    builder = PlanBuilder()
    builder.give_kv_to(runner)
    last_samples = np.full(8, -1, dtype=np.int32)
    rows = [Row(slot=index, tokens=tokens) for index, tokens in enumerate(sequences)]
    generated: list[list[int]] = [[] for _ in sequences]
    for step in range(12):
        plan = builder.plan(rows)
        assert (plan.token_ids < 0).all() == (step > 0)
        picked = runner.forward(plan, last_samples).argmax(axis=1).tolist()
        last_samples[: len(picked)] = picked
        rows = []
        for index, token in enumerate(picked):
            generated[index].append(token)
            start = len(sequences[index]) + step
            rows.append(Row(slot=index, tokens=[-1 - index], start=start))
    model = model_factory.reference(folder)
    for tokens, ours in zip(sequences, generated, strict=True):
        ids = torch.tensor([tokens])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
        assert ours == theirs[0, len(tokens) :].tolist()


def test_copies_are_applied_before_the_first_layer(models):
    """Two sequences share a whole block; the second gets a copy of the partial one."""
    folder = model_factory.make("llama", models)
    runner = load(folder)
    prompt, ends = prompts()[3] + [7, 8], ([11, 12], [21, 22])
    builder = PlanBuilder()
    builder.give_kv_to(runner)
    last_samples = np.zeros(8, dtype=np.int32)
    runner.forward(builder.plan([Row(slot=0, tokens=prompt)]), last_samples)
    builder.block_tables[1, 0] = builder.block_tables[0, 0]
    builder.block_tables[1, 1] = builder.take_block()
    builder.num_table_blocks[1] = 2
    rows = [
        Row(slot=slot, tokens=end, start=len(prompt), outputs=[0, 1])
        for slot, end in enumerate(ends)
    ]
    copy = (int(builder.block_tables[0, 1]), int(builder.block_tables[1, 1]))
    got = runner.forward(builder.plan(rows, copies=[copy]), last_samples)
    want = expected(folder, [prompt + end for end in ends])
    np.testing.assert_allclose(got[:2], want[0][-2:], atol=1e-4)
    np.testing.assert_allclose(got[2:], want[1][-2:], atol=1e-4)


def test_a_row_may_have_several_outputs_or_none(models):
    folder = model_factory.make("llama", models)
    runner = load(folder)
    builder = PlanBuilder()
    builder.give_kv_to(runner)
    last_samples = np.zeros(8, dtype=np.int32)
    rows = [Row(slot=0, tokens=[1, 2, 3], outputs=[-1, -1, 0]), Row(slot=1, tokens=[5], outputs=[])]
    got = runner.forward(builder.plan(rows), last_samples)
    assert np.array_equal(got[0], got[1])
    assert not np.array_equal(got[0], got[2])
    none = runner.forward(builder.plan([Row(slot=2, tokens=[4], outputs=[])]), last_samples)
    assert none.shape == (0, model_factory.VOCAB_SIZE)


def test_blocks_take_the_memory_that_is_announced(models):
    runner = load(model_factory.make("llama", models))
    for block_size in (8, 16, 32):
        runner.allocate_kv(10, block_size, np.zeros((2, 4), dtype=np.int32))
        assert runner._cache is not None
        assert runner._cache.kv.nbytes == 10 * runner.kv_bytes_per_block(block_size)


def test_a_plan_with_another_tier_is_refused(models):
    runner = load(model_factory.make("llama", models))
    builder = PlanBuilder()
    builder.give_kv_to(runner)
    plan = builder.plan([Row(slot=0, tokens=[1])])
    plan.copies_in = np.zeros((1, 4), dtype=np.int32)
    with pytest.raises(RuntimeError, match="another tier"):
        runner.forward(plan, np.zeros(8, dtype=np.int32))

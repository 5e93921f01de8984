"""Greedy answers equal transformers', token for token, whatever the conditions.

The conditions are those of :class:`Condition`. ``make test`` runs a pairwise cover of them: every
value of one factor meets every value of every other. ``make test-full`` runs the whole product.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import model_factory
from fastserve.config import EngineConfig
from fastserve.engine import Engine
from fastserve.models.resolve import resolve
from fastserve.runner import CpuRunner
from greedy import ABORT_STATES, MAX_TIES, TALLIES, Reference, Tally, run_round

NAME = "tiny models"
MIN_PREEMPTIONS = 20
MAX_ROUNDS = 100
ARCHITECTURES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
OTHERS = tuple(name for name in model_factory.VARIANTS if name not in ARCHITECTURES)
COUNTS = (1, 7, 16, 64, 512)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One way to run some prompts.

    Attributes:
        architecture: A model of ``model_factory``.
        arrival: All requests before the first step, or each after the one before it has ended.
        budget: ``max_num_batched_tokens``.
        chunk: ``max_chunk_tokens``.
        caching: Off; on and cold; on, and the prompts a second time.
        pool: Room for all, or for little more than one: then requests preempt each other.
        traffic: As they come; in a random order with random priorities under the ``priority``
            policy; or with every third one aborted, each in another state.
        block_size: Tokens per block. Prompts are a token shorter, as long and a token longer than
            one, two and three blocks.
        in_flight: ``max_num_steps_in_flight``.
    """

    architecture: str
    arrival: str
    budget: int
    chunk: int
    caching: str
    pool: str
    traffic: str
    block_size: int
    in_flight: int

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self)).replace(" ", "_")

    @property
    def max_tokens(self) -> int:
        """Where blocks are to run out, every sequence grows by more than one."""
        return self.block_size + 4 if self.pool == "small" else 12

    @property
    def preempts(self) -> bool:
        """Whether requests must get into each other's way."""
        return self.pool == "small" and self.arrival == "at once" and self.budget > 1


FACTORS: dict[str, tuple[Any, ...]] = {
    "architecture": ARCHITECTURES,
    "arrival": ("at once", "one by one"),
    "budget": COUNTS,
    "chunk": COUNTS,
    "caching": ("off", "cold", "repeated"),
    "pool": ("ample", "small"),
    "traffic": ("plain", "priorities", "aborts"),
    "block_size": (8, 16, 32),
    "in_flight": (1, 2),
}


def pairs_of(values: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    """Every two values of a condition, with their places."""
    places = itertools.combinations(enumerate(values), 2)
    return {(i, a, j, b) for (i, a), (j, b) in places}


def pairwise_cover() -> list[Condition]:
    """Conditions in which every two values of two factors meet, greedily few of them."""
    generator = random.Random(0)
    wanted = set().union(*map(pairs_of, itertools.product(*FACTORS.values())))
    cover = []
    while wanted:
        candidates = []
        for _ in range(60):
            # Start from a pair that is missing, so that every round gets on.
            i, a, j, b = generator.choice(sorted(wanted, key=repr))
            values = [generator.choice(values) for values in FACTORS.values()]
            values[i], values[j] = a, b
            candidates.append(tuple(values))
        best = max(candidates, key=lambda values: len(pairs_of(values) & wanted))
        wanted -= pairs_of(best)
        cover.append(Condition(**dict(zip(FACTORS, best, strict=True))))
    return cover


COVER = pairwise_cover()


class TinyModel:
    """A tiny model in both: here and in transformers."""

    def __init__(self, name: str, root: Path) -> None:
        folder = model_factory.make(name, root)
        self.loaded = CpuRunner.load(resolve(folder), dtype="float32", num_threads=1)
        eos = self.loaded.config.eos_token_ids
        self.reference = Reference(model_factory.reference(folder), eos, NAME)

    def engine(self, **limits: Any) -> Engine:
        """A new engine over the weights that are there."""
        loaded = self.loaded
        runner = CpuRunner(loaded.config, loaded.weights, loaded.pool, loaded.kv_dtype)
        return Engine(runner, None, EngineConfig(**limits))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("tiny")
    return {name: TinyModel(name, root) for name in model_factory.VARIANTS}


def prompts_for(block_size: int) -> list[list[int]]:
    """Around the ends of blocks; some begin the same."""
    generator = np.random.default_rng(block_size)
    texts = generator.integers(3, model_factory.VOCAB_SIZE, (2, 3 * block_size + 1)).tolist()
    lengths = [1] + [k * block_size + more for k in (1, 2, 3) for more in (-1, 0, 1)]
    return [texts[number % 3 == 2][:length] for number, length in enumerate(lengths)]


def run(condition: Condition, model: TinyModel) -> None:
    """Answer the prompts under `condition`, compare, and see that it was what it says."""
    prompts = prompts_for(condition.block_size)
    longest = -(-(max(map(len, prompts)) + condition.max_tokens) // condition.block_size)
    engine = model.engine(
        max_num_batched_tokens=condition.budget,
        max_chunk_tokens=condition.chunk,
        enable_prefix_caching=condition.caching != "off",
        num_blocks=longest + 1 if condition.pool == "small" else 10 * longest,
        scheduling_policy="priority" if condition.traffic == "priorities" else "fcfs",
        block_size=condition.block_size,
        max_num_steps_in_flight=condition.in_flight,
        max_num_seqs=16,
    )
    order = random.Random(str(condition))
    for number in range(MAX_ROUNDS):
        priorities = None
        if condition.traffic == "priorities":
            order.shuffle(prompts)
            priorities = [order.randrange(3) for _ in prompts]
        run_round(
            engine,
            model.reference,
            prompts,
            condition.max_tokens,
            one_by_one=condition.arrival == "one by one",
            priorities=priorities,
            aborts=order.randrange(5) if condition.traffic == "aborts" else None,
            where=str(condition),
        )
        stats = engine.stats()
        enough = not condition.preempts or stats["num_preemptions"] >= MIN_PREEMPTIONS
        if enough and number >= (condition.caching == "repeated"):
            break
        if condition.caching == "cold":
            engine.reset_prefix_cache()
    if condition.preempts:
        assert stats["num_preemptions"] >= MIN_PREEMPTIONS
    elif condition.pool == "ample":
        assert stats["num_preemptions"] == 0
    if condition.caching == "off":
        assert stats["prefix_cache_hits"] == 0
    elif condition.caching == "repeated" and condition.pool == "ample":
        assert stats["prefix_cache_hits"] > sum(map(len, prompts)) // 2
    engine.shutdown()


def test_the_cover_is_one() -> None:
    met = set().union(*(pairs_of(tuple(vars(condition).values())) for condition in COVER))
    assert met == set().union(*map(pairs_of, itertools.product(*FACTORS.values())))
    assert len(COVER) < 50


@pytest.mark.parametrize("condition", COVER, ids=str)
def test_greedy_answers_equal_transformers(
    tiny_models: dict[str, TinyModel], condition: Condition
) -> None:
    run(condition, tiny_models[condition.architecture])


def test_aborts_come_in_every_state(tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["llama"]
    before = Counter(model.reference.tally.aborted_in)
    engine = model.engine(num_blocks=6, block_size=8, max_num_batched_tokens=64, max_chunk_tokens=7)
    wanted = set(ABORT_STATES) - {"any"}
    # Steps go on while this thread looks, so each state has to last for some: of short prompts with
    # long answers the last one is preempted until another has ended.
    rounds = [(prompts_for(8), 12), (prompts_for(8)[:3], 40)]
    for number in range(MAX_ROUNDS):
        prompts, max_tokens = rounds[number % 2]
        first = number // 2 % len(ABORT_STATES)
        run_round(engine, model.reference, prompts, max_tokens, aborts=first)
        if set(model.reference.tally.aborted_in - before) == wanted:
            break
    assert set(model.reference.tally.aborted_in - before) == wanted


@pytest.mark.parametrize("name", OTHERS)
def test_other_variants_under_the_hardest_conditions(
    tiny_models: dict[str, TinyModel], name: str
) -> None:
    for in_flight, budget in ((1, 512), (2, 16)):
        condition = Condition(
            architecture=name,
            arrival="at once",
            budget=budget,
            chunk=7,
            caching="repeated",
            pool="small",
            traffic="priorities",
            block_size=8,
            in_flight=in_flight,
        )
        run(condition, tiny_models[name])


OUTER = ("architecture", "block_size", "caching", "in_flight")
INNER = [name for name in FACTORS if name not in OUTER]


def product_within(outer: tuple[Any, ...]) -> Iterator[Condition]:
    """All conditions with these values of :data:`OUTER`, less those that are another one again.

    A chunk larger than the budget is one of the budget's size, and priorities order nothing where
    one request is there at a time.
    """
    for inner in itertools.product(*(FACTORS[name] for name in INNER)):
        values = dict(zip(OUTER, outer, strict=True)) | dict(zip(INNER, inner, strict=True))
        condition = Condition(**values)
        alone = condition.arrival == "one by one"
        if condition.chunk <= condition.budget and not (
            alone and condition.traffic == "priorities"
        ):
            yield condition


@pytest.mark.full
@pytest.mark.parametrize(
    "outer",
    list(itertools.product(*(FACTORS[name] for name in OUTER))),
    ids=lambda values: "-".join(map(str, values)),
)
def test_greedy_answers_equal_transformers_in_the_whole_product(
    tiny_models: dict[str, TinyModel], outer: tuple[Any, ...]
) -> None:
    for condition in product_within(outer):
        run(condition, tiny_models[condition.architecture])


def test_ties_are_rare() -> None:
    tally = TALLIES.get(NAME, Tally())
    assert len(tally.ties) <= tally.num_tokens * MAX_TIES

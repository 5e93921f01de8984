"""The kernels of sampling against plain numpy in float64 and Python's own integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from fastserve._core import cpu

Logits = NDArray[np.float32]
Weights = NDArray[np.int64]

ONE = 2**40
LEFT_OUT = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).standard_normal((rows, vocab_size), dtype=np.float32) * 3


def pools() -> list[cpu.Pool]:
    return [cpu.Pool(num, isa) for isa in cpu.available_isas() for num in (1, 2, 3)]


# The draw, as rust/cpu/src/sampling/draw.rs tells it


def reference_weights(
    logits: Logits, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Weights:
    """The weights of one row; zero for a token that is not kept."""
    with np.errstate(over="ignore"):
        z = logits / np.float32(temperature)
    weights = np.rint(np.exp(z.astype(np.float64) - z.max()) * ONE).astype(np.int64)
    weights[weights < float(np.float32(min_p)) * ONE] = 0
    if 0 < top_k < len(z):
        weights[z < np.sort(z)[-top_k]] = 0
    if np.float32(top_p) < 1.0:
        target = max(int(float(np.float32(top_p)) * float(weights.sum())), 1)
        order = np.argsort(-weights, kind="stable")
        num_kept = int(weights[order].cumsum().searchsorted(target)) + 1
        weights[order[num_kept:]] = 0
    return weights


def reference_draw(weights: Weights, bits: int) -> int:
    running = weights.cumsum()
    return int(running.searchsorted(bits * int(running[-1]) >> 64, side="right"))


def draw(
    logits: Logits, bits: list[int], pool: cpu.Pool | None = None, **settings: float
) -> list[int]:
    """A draw from one row for each of `bits`."""
    num = len(bits)
    given = LEFT_OUT | settings
    floats = {name: np.full(num, given[name], np.float32) for name in LEFT_OUT if name != "top_k"}
    return cpu.draw_tokens(
        pool or cpu.Pool(1),
        logits[None],
        np.zeros(num, np.int32),
        top_k=np.full(num, given["top_k"], np.int32),
        bits=np.array(bits, np.uint64),
        **floats,
    ).tolist()


def inside(weights: Weights) -> dict[int, list[int]]:
    """Bits that pick each kept token: near the ends of its share, and in the middle.

    The ends themselves are left out: weights of two exponentials differ by one now and then.
    """
    running = [0, *weights.cumsum().tolist()]
    found = {}
    for token in np.flatnonzero(weights).tolist():
        low, high = running[token] << 64, running[token + 1] << 64
        margin = min((high - low) // 4, 2**24 << 64)
        places = (low + margin, (low + high) // 2, high - margin)
        found[token] = [place // running[-1] for place in places]
    return found


def assert_drawn(logits: Logits, weights: Weights, **settings: float) -> None:
    """What is drawn is kept in the reference, and each token as often."""
    wanted = inside(weights)
    got = draw(logits, [bits for each in wanted.values() for bits in each], **settings)
    assert got == [token for token, each in wanted.items() for _ in each]
    assert draw(logits, [0, 2**64 - 1], **settings) == [min(wanted), max(wanted)]


def some_row(kind: str, vocab_size: int, rng: np.random.Generator) -> Logits:
    row = rng.standard_normal(vocab_size, dtype=np.float32) * 3
    if kind == "ties":
        row = np.round(row * 2) / 2
    elif kind == "masked":
        row[rng.random(vocab_size) < 0.5] = -np.inf
        row[rng.integers(vocab_size)] = 4.0
    elif kind == "equal":
        row[:] = 1.5
    elif kind == "peaked":
        row[rng.integers(vocab_size)] = 60.0
    return row


KINDS = ("noise", "ties", "masked", "equal", "peaked")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 1000, 50_000])
def test_draws_are_the_reference(vocab_size: int, kind: str) -> None:
    rng = np.random.default_rng(vocab_size)
    for _ in range(12 if vocab_size > 1000 else 60):
        row = some_row(kind, vocab_size, rng)
        settings = {
            "temperature": float(np.float32(10.0 ** rng.uniform(-2, 2))),
            "top_k": int(rng.choice([0, 0, 1, -1, 7, vocab_size // 2, vocab_size + 5])),
            "top_p": float(rng.choice([1.0, 0.95, 0.5, rng.random(), 1e-9])),
            "min_p": float(rng.choice([0.0, 0.0, 0.05, rng.random(), 1.0])),
        }
        weights = reference_weights(row, **settings)
        bits = rng.integers(0, 2**64, 20, dtype=np.uint64).tolist()
        wanted = [reference_draw(weights, each) for each in bits]
        assert draw(row, bits, **settings) == wanted, settings


def reference_kept(z: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The rules in float64, without integers; ``z`` is divided by the temperature already."""
    probabilities = np.exp(z - z.max())
    least = max(min_p, 2.0**-41)  # Below it an integer weight is zero.
    kept = {token for token in range(len(z)) if probabilities[token] >= least}
    if 0 < top_k < len(z):
        kept &= {token for token in range(len(z)) if z[token] >= np.sort(z)[-top_k]}
    total = sum(probabilities[token] for token in kept)
    before, within = 0.0, set()
    for token in sorted(kept, key=lambda token: (-probabilities[token], token)):
        if before < top_p * total:
            within.add(token)
        before += probabilities[token]
    return within


@pytest.mark.parametrize("top_k", [0, 1, 5, 49, 50, 51])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_kept_tokens_are_the_reference(top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(8, 50, seed=11)
    for row, temperature in zip(logits, np.linspace(0.3, 2.0, 8, dtype=np.float32), strict=True):
        settings = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        wanted = reference_kept((row / temperature).astype(np.float64), **settings)
        settings["temperature"] = float(temperature)
        weights = reference_weights(row, **settings)
        assert np.flatnonzero(weights).tolist() == sorted(wanted)
        assert_drawn(row, weights, **settings)


@pytest.mark.parametrize(("top_p", "at_least"), [(0.05, 100), (0.3, 1000), (0.9, 4096)])
def test_top_p_looks_further_where_it_must(top_p: float, at_least: int) -> None:
    logits = random_logits(1, 6000, seed=2)[0] * 0.05  # Nearly flat.
    weights = reference_weights(logits, **LEFT_OUT | {"top_p": top_p})
    assert set(np.flatnonzero(weights)) == reference_kept(logits.astype(float), 0, top_p, 0.0)
    assert np.count_nonzero(weights) > at_least
    assert_drawn(logits, weights, top_p=top_p)


@pytest.mark.parametrize("top_k", [1, 60, 100, 3000, 5999])
def test_top_k_of_many(top_k: int) -> None:
    logits = random_logits(1, 6000, seed=2)[0]
    weights = reference_weights(logits, **LEFT_OUT | {"top_k": top_k})
    assert np.count_nonzero(weights) == top_k
    assert_drawn(logits, weights, top_k=top_k)


def test_equal_tokens_at_the_edge() -> None:
    logits = np.zeros(10, dtype=np.float32)
    middles = [int((token + 0.5) / 10 * 2**64) for token in range(10)]
    assert set(draw(logits, middles, top_p=0.35)) == {0, 1, 2, 3}  # By id.
    assert draw(logits, middles, top_k=3) == list(range(10))  # Equals of the k-th, as in vLLM.


def test_logits_that_become_equal_are_equal() -> None:
    """Two neighbours of float32 have one quotient: the k-th largest is a matter of quotients."""
    low, high = np.float32(1.9), np.nextafter(np.float32(1.9), np.float32(2.0))
    temperature = next(t for t in np.arange(1.1, 1.9, 0.1, np.float32) if low / t == high / t)
    logits = np.array([high, low, -5.0], dtype=np.float32)
    assert draw(logits, [0, 2**64 - 1], top_k=1, temperature=float(temperature)) == [0, 1]


@pytest.mark.parametrize("vocab_size", [1, 2, 300, 50_000])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-46, 2.0])
@pytest.mark.parametrize("top_k", [0, 5])
def test_no_settings_lead_out_of_the_vocabulary(
    vocab_size: int, name: str, value: float, top_k: int
) -> None:
    for row in (random_logits(1, vocab_size)[0], np.full(vocab_size, -np.inf, np.float32)):
        row[vocab_size // 2] = np.nan
        tokens = draw(row, [0, 2**63, 2**64 - 1], **{"top_k": top_k, name: value})
        assert all(0 <= token < vocab_size for token in tokens)


def test_frequencies_are_the_softmax() -> None:
    logits = random_logits(1, 12, seed=9)[0] * np.float32(0.4)
    num = 40_000
    zeros = np.zeros(num, np.int32)
    bits = cpu.draw_bits(np.full(num, 123, np.uint64), zeros, np.arange(num, dtype=np.int32))
    tokens = draw(logits, bits.tolist(), temperature=0.7)
    shares = np.exp(logits.astype(np.float64) / 0.7)
    expected = shares / shares.sum() * num
    counts = np.bincount(tokens, minlength=12)
    assert ((counts - expected) ** 2 / expected).sum() < 31.3  # chi-squared, 11, p < 0.001


# The best token


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 50, 8192, 8193, 50_000])
def test_best_tokens_are_numpys(vocab_size: int) -> None:
    logits = random_logits(9, vocab_size, seed=vocab_size)
    logits[1] = 0.25
    logits[2] = np.round(logits[2])
    logits[3, vocab_size // 2], logits[4, vocab_size - 1], logits[5, 0] = np.nan, np.inf, -np.inf
    logits[6], logits[7] = -np.inf, 3e38  # The sum of the latter overflows.
    logits[8, vocab_size // 3 :] = -0.0
    for pool in pools():
        tokens, values, finite = cpu.best_tokens(pool, logits)
        assert finite.tolist() == np.isfinite(logits).all(axis=1).tolist()
        np.testing.assert_array_equal(values, logits.max(axis=1))
        others = np.arange(9) != 3
        assert tokens[others].tolist() == logits.argmax(axis=1)[others].tolist()
        assert 0 <= tokens[3] < vocab_size


# Log probabilities


def reference_logprobs(row: Logits) -> NDArray[np.float64]:
    shifted = row.astype(np.float64) - row.max()
    return shifted - math.log(math.fsum(np.exp(shifted)))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 1000, 50_000])
def test_logprobs_are_the_reference(vocab_size: int, scale: float) -> None:
    logits = random_logits(6, vocab_size, seed=vocab_size) * np.float32(scale)
    logits[1] = np.round(logits[1])  # Equals.
    logits[2] = 0.0
    logits[3] += 1000.0
    rows = np.array([0, 1, 2, 3, 4, 5, 0], dtype=np.int32)
    chosen = np.random.default_rng(1).integers(0, vocab_size, 7).astype(np.int32)
    num_best = np.array([5, 20, 3, 1, 0, vocab_size + 1, 2], dtype=np.int32)
    for pool in pools():
        found = cpu.row_logprobs(pool, logits, rows, chosen, num_best)
        for row, token, num, (rank, ids, values) in zip(
            rows, chosen.tolist(), num_best.tolist(), found, strict=True
        ):
            assert rank == 1 + int((logits[row] > logits[row, token]).sum())
            assert ids == [token, *np.argsort(-logits[row], kind="stable")[:num].tolist()]
            wanted = reference_logprobs(logits[row])[ids]
            np.testing.assert_allclose(values, wanted, rtol=6e-8, atol=1e-7)


# The same bits whatever computes them


def test_threads_instructions_and_company_change_nothing() -> None:
    logits = random_logits(40, 5000, seed=21)
    rows = np.arange(40, dtype=np.int32)
    settings = {
        "temperature": np.linspace(0.1, 3, 40, dtype=np.float32),
        "top_k": np.where(rows % 3, rows, 0).astype(np.int32),
        "top_p": np.where(rows % 2, 0.9, 1).astype(np.float32),
        "min_p": np.where(rows % 5, 0, 0.01).astype(np.float32),
        "bits": cpu.draw_bits(rows.astype(np.uint64), rows, rows),
    }
    num_best = rows % 7

    def all_of(pool: cpu.Pool, order: NDArray[np.int32]) -> list[object]:
        given = {name: values[order] for name, values in settings.items()}
        drawn = cpu.draw_tokens(pool, logits, order, **given)
        found = cpu.row_logprobs(pool, logits, order, drawn, num_best[order])
        best = cpu.best_tokens(pool, logits[order])
        return list(zip(drawn.tolist(), found, *(each.tolist() for each in best), strict=True))

    wanted = all_of(cpu.Pool(1, "portable"), rows)
    shuffled = np.random.default_rng(0).permutation(rows)
    for pool in pools():
        assert all_of(pool, rows) == wanted
        assert all_of(pool, shuffled) == [wanted[row] for row in shuffled]
        assert [each for row in rows for each in all_of(pool, rows[row : row + 1])] == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros((2, 0), np.float32)}, "logits: got .*want float32 with 1 to"),
        ({"logits": np.zeros((2, 3), np.uint16)}, "logits: got .*want float32 with 1 to"),
        ({"rows": np.array([0, 2], np.int32)}, "rows: got 2 at 1, want 0 to 1"),
        ({"rows": np.array([-1, 0], np.int32)}, "rows: got -1 at 0, want 0 to 1"),
        ({"temperature": np.ones(3, np.float32)}, "temperature: got 3 values, want .*rows, 2"),
        ({"top_k": np.ones(1, np.int32)}, "top_k: got 1 values, want one for each of rows, 2"),
        ({"top_p": np.ones(4, np.float32)[::2]}, "top_p: got an array with gaps"),
        ({"min_p": np.ones(0, np.float32)}, "min_p: got 0 values, want one for each of rows, 2"),
        ({"bits": np.ones(1, np.uint64)}, "bits: got 1 values, want one for each of rows, 2"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    ones = np.ones(2, np.float32)
    given = {
        "logits": np.zeros((2, 3), np.float32),
        "rows": np.array([0, 1], np.int32),
        "temperature": ones,
        "top_k": np.zeros(2, np.int32),
        "top_p": ones,
        "min_p": ones,
        "bits": np.zeros(2, np.uint64),
    }
    assert len(cpu.draw_tokens(cpu.Pool(1), **given)) == 2
    with pytest.raises(ValueError, match=message):
        cpu.draw_tokens(cpu.Pool(1), **given | change)

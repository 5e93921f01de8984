"""The sampler against references written out in float64 and plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from fastserve.arena import Header, OutputKind, PlanView
from fastserve.sampler import ALL_MASKED, NOT_FINITE, Sampler, SampleResult
from fastserve.sampling_params import SamplingParams
from fastserve.sampling_record import MAX_RECORD_WORDS, encode
from plans import layout_for

VOCAB_SIZE = 50
EOS = 1

Logits = NDArray[np.float32]


@dataclass
class Step:
    """A plan with only what a sampler reads: events and output rows."""

    events: list[list[int]] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        prompt: list[int],
        output: list[int] | None = None,
        *,
        request: int = 7,
        index: int = 0,
        seed: int = 0,
    ) -> Step:
        end = [*params.stop_token_ids] if params.ignore_eos else [EOS, *params.stop_token_ids]
        record = encode(params, params.seed if params.seed is not None else seed, end)
        tokens = prompt + (output or [])
        low = np.uint32(request & 0xFFFFFFFF).astype(np.int32)
        event = [1, slot, int(low), request >> 32, index, len(prompt), len(tokens)]
        event += [len(self.words), len(record)]
        self.events.append(event + [0] * (16 - len(event)))
        self.words += record.tolist() + tokens
        return self

    def release(self, slot: int) -> Step:
        self.events.append([2, slot] + [0] * 14)
        return self

    def output(self, slot: int, position: int, kind: OutputKind = OutputKind.SAMPLE) -> Step:
        """An output row for the token at `position`, so the one drawn stands after it."""
        self.slots.append(slot)
        self.positions.append(position)
        self.kinds.append(int(kind))
        return self

    def view(self) -> PlanView:
        layout, num_words = layout_for(64, 4096, 4096)
        words = np.full(num_words, -77, dtype=np.int32)
        header = [0] * 32
        header[Header.VERSION] = 1
        header[Header.NUM_TOKENS] = header[Header.NUM_OUTPUTS] = len(self.slots)
        header[Header.NUM_SLOT_EVENTS] = len(self.events)
        header[Header.NUM_EVENT_WORDS] = len(self.words)
        sections = {
            "header": header,
            "positions": self.positions,
            "out_rows": list(range(len(self.slots))),
            "out_slots": self.slots,
            "out_kinds": self.kinds,
            "slot_events": [word for event in self.events for word in event],
            "event_words": self.words,
        }
        for name, values in sections.items():
            offset, capacity = layout[name]
            assert len(values) <= capacity
            words[offset : offset + len(values)] = values
        return PlanView(words, layout)


def run(sampler: Sampler, logits: Logits, step: Step) -> SampleResult:
    plan = step.view()
    sampler.apply_events(plan)
    return sampler.sample(logits, plan)


def one(logits: Logits, params: SamplingParams, prompt=(5,), output=(), **event) -> int:
    """The token a fresh sampler takes for one sequence."""
    prompt, output = list(prompt), list(output)
    step = Step().assign(0, params, prompt, output, **event)
    step.output(0, len(prompt) + len(output) - 1)
    result = run(Sampler(4, len(logits)), logits[None].copy(), step)
    assert result.counts.tolist() == [1]
    return int(result.tokens[0])


def random_logits(rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).standard_normal((rows, vocab_size), dtype=np.float32) * 3


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def best(values: NDArray[np.float64], num: int) -> list[int]:
    """The `num` best places, the best first."""
    return np.argsort(-values, kind="stable")[:num].tolist()


def zeros(*shape: int) -> Logits:
    return np.zeros(shape, dtype=np.float32)


GREEDY = SamplingParams(temperature=0)


# Greedy


def test_greedy_takes_the_best_and_of_equals_the_lowest_id() -> None:
    logits = random_logits(3)
    logits[1, [40, 3, 17]] = 99.0
    logits[2] = 0.25
    step = Step()
    for slot in range(3):
        step.assign(slot, GREEDY, [2, 3]).output(slot, 1)
    sampler = Sampler(4, VOCAB_SIZE)
    result = run(sampler, logits, step)
    assert result.counts.tolist() == [1, 1, 1]
    assert result.tokens.tolist() == [int(np.argmax(logits[0])), 3, 0]
    assert sampler.last_samples[:3].tolist() == result.tokens.tolist()


def test_the_greedy_path_leaves_logits_alone() -> None:
    logits = random_logits(2)
    before = logits.copy()
    params = SamplingParams(logit_bias={3: 5.0}, repetition_penalty=2.0, top_k=4, seed=1)
    step = Step().assign(0, GREEDY, [2]).output(0, 0).assign(1, params, [2]).output(1, 0)
    run(Sampler(4, VOCAB_SIZE), logits, step)
    assert np.array_equal(logits, before)


# What changes logits


def reference_adjusted(
    logits: Logits, params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """vLLM's order, one token at a time."""
    values = [float(value) for value in logits]
    end = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    for token in range(len(values)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            values[token] = -math.inf
        if len(output) < params.min_tokens and token in end:
            values[token] = -math.inf
        values[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] -= params.presence_penalty * (token in output)
    return values


ADJUSTMENTS = {
    "bias": {"logit_bias": {3: 50.0, 4: -50.0}},
    "negative bias": {"logit_bias": dict.fromkeys(range(0, 50, 2), -100.0)},
    "allowed": {"allowed_token_ids": [9, 30, 2]},
    "allowed with bias": {"allowed_token_ids": [9, 30, 2], "logit_bias": {30: 9.0, 5: 90.0}},
    "repetition": {"repetition_penalty": 1.9},
    "repetition below one": {"repetition_penalty": 0.4},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -2.0},
    "min tokens": {"min_tokens": 9, "logit_bias": {EOS: 60.0, 8: 70.0}, "stop_token_ids": [8]},
    "min tokens reached": {"min_tokens": 4, "logit_bias": {EOS: 60.0}},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.2,
        "logit_bias": {3: 2.0},
        "min_tokens": 5,
    },
}


@pytest.mark.parametrize("name", ADJUSTMENTS)
@pytest.mark.parametrize("seed", range(4))
def test_adjusted_logits_are_the_reference(name: str, seed: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=99, **ADJUSTMENTS[name])
    logits = random_logits(1, seed=seed)[0]
    generator = np.random.default_rng(seed)
    prompt = generator.integers(0, VOCAB_SIZE, 6).tolist()
    output = generator.integers(0, 10, 4).tolist()
    wanted = reference_adjusted(logits, params, prompt, output)
    assert one(logits, params, prompt, output) == int(np.argmax(wanted))


def test_penalties_follow_the_tokens_sampled_since() -> None:
    """Token by token, then again from the tokens so far, as after a preemption."""
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, frequency_penalty=0.6, presence_penalty=0.3
    )
    logits = random_logits(1, seed=3)
    prompt, output = [4, 4, 9], []
    sampler = Sampler(2, VOCAB_SIZE)
    step = Step().assign(1, params, prompt)
    for _ in range(20):
        wanted = int(np.argmax(reference_adjusted(logits[0], params, prompt, output)))
        step.output(1, len(prompt) + len(output) - 1)
        assert run(sampler, logits, step).tokens.tolist() == [wanted]
        assert one(logits[0], params, prompt, output) == wanted
        output.append(wanted)
        step = Step()
    assert len(set(output)) > 3


def test_min_tokens_counts_output_and_not_prompt() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[8])
    logits = zeros(VOCAB_SIZE)
    logits[EOS], logits[8], logits[20] = 9.0, 8.0, 7.0
    prompt = [2] * 10
    assert [one(logits, params, prompt, [20] * n) for n in range(5)] == [20, 20, 20, EOS, EOS]
    ignoring = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[8], ignore_eos=True)
    assert one(logits, ignoring, prompt) == EOS


# Noise


def test_the_same_seed_gives_the_same_token_in_any_company() -> None:
    params = SamplingParams(temperature=1.2, top_k=30, top_p=0.97, seed=42, frequency_penalty=0.3)
    logits = random_logits(40, seed=21)
    alone = [one(logits[row], params, [3] * 4, [7] * row) for row in range(40)]
    step, order = Step(), np.random.default_rng(0).permutation(40)
    for slot, row in enumerate(order.tolist()):
        mixed = GREEDY if row % 3 == 0 else params
        step.assign(slot, mixed, [3] * 4, [7] * row).output(slot, 3 + row)
    together = run(Sampler(40, VOCAB_SIZE), logits[order], step)
    for slot, row in enumerate(order.tolist()):
        if row % 3:
            assert together.tokens[slot] == alone[row]
    assert len(set(alone)) > 5


def test_sequences_of_one_request_differ_by_their_index() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    logits = zeros(VOCAB_SIZE)
    tokens = {one(logits, params, index=index) for index in range(20)}
    assert len(tokens) > 8


def test_forks_of_one_row_sample_apart() -> None:
    """Several outputs of one token row, each with its own slot, as a plan does for n > 1."""
    params = SamplingParams(temperature=1.0, seed=5, presence_penalty=1.0)
    logits = zeros(6, VOCAB_SIZE)
    step = Step()
    for slot in range(6):
        step.assign(slot, params, [2, 3], index=slot).output(slot, 1)
    sampler = Sampler(8, VOCAB_SIZE)
    result = run(sampler, logits, step)
    alone = [one(logits[0], params, [2, 3], index=index) for index in range(6)]
    assert result.tokens.tolist() == alone == sampler.last_samples[:6].tolist()


# Slots change hands


def test_a_reassigned_slot_remembers_nothing() -> None:
    sampler = Sampler(1, VOCAB_SIZE)
    wild = SamplingParams(
        temperature=2.0, seed=3, logit_bias={7: 100.0}, allowed_token_ids=[7, 8], min_tokens=5,
        presence_penalty=2.0, logprobs=3,
    )  # fmt: skip
    logits = random_logits(1)
    run(sampler, logits, Step().assign(0, wild, [2]).output(0, 0))
    result = run(sampler, logits, Step().release(0).assign(0, GREEDY, [2]).output(0, 0))
    assert result.tokens.tolist() == [int(logits[0].argmax())]
    assert result.logprobs == {}


def test_tokens_not_known_yet_are_the_slots_last_samples() -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    sampler = Sampler(2, VOCAB_SIZE)
    logits = zeros(1, VOCAB_SIZE)
    logits[0, 10], logits[0, 11] = 1.0, 0.5
    run(sampler, logits, Step().assign(1, GREEDY, [2]).output(1, 0))  # Samples 10.
    step = Step().assign(0, params, [2], [-1 - 1]).output(0, 1)
    assert run(sampler, logits, step).tokens.tolist() == [11]


# Rows that fail


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, logprobs=2)])
def test_a_row_that_is_not_finite_fails_alone(poison: float, params: SamplingParams) -> None:
    logits = random_logits(3)
    step = Step()
    for slot in range(3):
        step.assign(slot, params, [2], index=slot).output(slot, 0)
    good = run(Sampler(4, VOCAB_SIZE), logits.copy(), step)
    logits[1, 33] = poison
    result = run(Sampler(4, VOCAB_SIZE), logits, step)
    assert result.counts.tolist() == [1, NOT_FINITE, 1]
    assert result.tokens[[0, 2]].tolist() == good.tokens[[0, 2]].tolist()
    assert 1 not in result.logprobs


def test_huge_finite_logits_are_no_failure() -> None:
    logits = np.full((1, VOCAB_SIZE), 3e38, dtype=np.float32)  # Their sum overflows.
    assert run(
        Sampler(1, VOCAB_SIZE), logits, Step().assign(0, GREEDY, [2]).output(0, 0)
    ).counts.tolist() == [1]


def unchecked(**values: float) -> SamplingParams:
    """Parameters that no caller can make, as a record could still bring them."""
    params = SamplingParams(seed=1)
    for name, value in values.items():
        object.__setattr__(params, name, value)
    return params


@pytest.mark.parametrize("scale", [-1.0, 1.0])
@pytest.mark.parametrize(
    ("params", "size"),
    [
        (SamplingParams(seed=1, repetition_penalty=0.01), 1e37),
        (SamplingParams(seed=1, repetition_penalty=100.0, top_k=3), 1e37),
        (SamplingParams(temperature=0, repetition_penalty=0.01), 1e37),
        (SamplingParams(seed=1, temperature=1e-5, top_p=0.5), 1e37),
        (SamplingParams(seed=1, temperature=1e-5, min_p=0.5), 1e37),
        (SamplingParams(seed=1, logit_bias={2: 100.0}), 3.4e38),
        (SamplingParams(seed=1, temperature=3e38, allowed_token_ids=[2, 3]), 1.0),
        (unchecked(repetition_penalty=1e-46), 1.0),
        (unchecked(repetition_penalty=1e-40), 1.0),
        (unchecked(repetition_penalty=math.nan), 1.0),
        (unchecked(repetition_penalty=1e39), 1.0),
        (unchecked(presence_penalty=-math.inf), 1.0),
        (unchecked(temperature=math.inf, allowed_token_ids=(2, 3)), 1.0),
        (unchecked(logit_bias={2: math.nan}), 1.0),
    ],
)
@pytest.mark.filterwarnings("error", "ignore:overflow encountered in cast")
def test_a_row_that_leaves_float32_touches_no_other(
    params: SamplingParams, size: float, scale: float
) -> None:
    logits = random_logits(3)
    logits[1] *= scale * size / np.abs(logits[1]).max()
    assert np.isfinite(logits).all()
    step = Step()
    for slot, each in enumerate((SamplingParams(seed=1), params, GREEDY)):
        step.assign(slot, each, [2], [2, 3, 2, 3]).output(slot, 4)
    alone = Step().assign(0, SamplingParams(seed=1), [2], [2, 3, 2, 3]).output(0, 4)
    wanted = run(Sampler(1, VOCAB_SIZE), logits[:1], alone).tokens[0]
    with np.errstate(divide="ignore", invalid="ignore"):  # What unchecked parameters may do.
        result = run(Sampler(4, VOCAB_SIZE), logits, step)
    assert result.counts[[0, 2]].tolist() == [1, 1]
    assert result.counts[1] in (1, NOT_FINITE, ALL_MASKED)
    assert result.tokens[[0, 2]].tolist() == [wanted, int(logits[2].argmax())]
    assert 0 <= result.tokens[1] < VOCAB_SIZE


def test_what_is_not_finite_after_penalties_is_named() -> None:
    logits = np.full((2, VOCAB_SIZE), 1e37, dtype=np.float32)
    step = Step()
    for slot, temperature in enumerate((0.0, 1.0)):
        params = SamplingParams(temperature=temperature, repetition_penalty=0.01)
        step.assign(slot, params, [2]).output(slot, 0)
    assert run(Sampler(2, VOCAB_SIZE), logits, step).counts.tolist() == [NOT_FINITE] * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_masked_fails_alone(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=[EOS], min_tokens=2)
    logits = random_logits(2)
    step = Step().assign(0, params, [2]).output(0, 0).assign(1, GREEDY, [2]).output(1, 0)
    assert run(Sampler(2, VOCAB_SIZE), logits, step).counts.tolist() == [ALL_MASKED, 1]


# Log probabilities


def test_logprobs_are_of_raw_logits() -> None:
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={4: 100.0})
    logits = random_logits(2)
    step = Step().assign(0, params, [2]).output(0, 0).assign(1, GREEDY, [2]).output(1, 0)
    result = run(Sampler(2, VOCAB_SIZE), logits, step)
    wanted = log_softmax(logits[0])
    row = result.logprobs[0]
    assert set(result.logprobs) == {0}
    assert row.token_ids == [4, *best(wanted, 3)]
    np.testing.assert_allclose(row.logprobs, wanted[row.token_ids], atol=1e-6)
    assert row.rank == int((wanted > wanted[4]).sum()) + 1


def test_logprobs_zero_reports_the_chosen_token_only() -> None:
    logits = random_logits(1)
    step = Step().assign(0, SamplingParams(temperature=0, logprobs=0), [2]).output(0, 0)
    row = run(Sampler(1, VOCAB_SIZE), logits, step).logprobs[0]
    assert (row.token_ids, row.rank) == ([int(logits[0].argmax())], 1)


def test_prompt_logprobs_score_the_token_that_follows() -> None:
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 70).tolist()
    params = SamplingParams(temperature=0, prompt_logprobs=2)
    logits = random_logits(70)
    sampler = Sampler(2, VOCAB_SIZE)
    request = 2**40 + 3
    first = Step().assign(1, params, prompt, request=request)
    for position in range(40):
        first.output(1, position, OutputKind.SCORE)
    second = Step()
    for position in range(40, 69):
        second.output(1, position, OutputKind.SCORE)
    second.output(1, 69)
    results = run(sampler, logits[:40], first), run(sampler, logits[40:], second)
    assert results[0].counts.tolist() == [0] * 40
    assert results[1].counts.tolist() == [0] * 29 + [1]
    assert results[1].tokens[-1] == int(logits[69].argmax())
    scores = [*results[0].scores, *results[1].scores]
    assert [score.position for score in scores] == list(range(1, 70))
    wanted = log_softmax(logits)
    for score in scores:
        row = wanted[score.position - 1]
        assert score.request_id == request
        assert score.logprobs.token_ids == [prompt[score.position], *best(row, 2)]
        np.testing.assert_allclose(
            score.logprobs.logprobs, row[score.logprobs.token_ids], atol=1e-5
        )


def test_a_poisoned_score_row_fails_its_request() -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    logits = random_logits(2)
    logits[0, 0] = math.nan
    step = Step().assign(0, params, [2, 3, 4])
    step.output(0, 0, OutputKind.SCORE).output(0, 1, OutputKind.SCORE)
    assert run(Sampler(1, VOCAB_SIZE), logits, step).counts.tolist() == [NOT_FINITE, 0]


def test_an_output_kind_that_is_not_built_says_so() -> None:
    step = Step().assign(0, GREEDY, [2]).output(0, 0, OutputKind.EMBED)
    with pytest.raises(ValueError, match="out_kinds: got 3 at 0, want 0"):
        run(Sampler(1, VOCAB_SIZE), random_logits(1), step)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step().output(1, 0), "out_slots: got 1 at 0, want a slot that is assigned"),
        (Step().assign(2, GREEDY, [2]), "slot: got 2, want one of 2 slots"),
        (
            Step().assign(0, SamplingParams(allowed_token_ids=[VOCAB_SIZE]), [2]),
            "sampling record: got 50 at 0, want 0 to 49",
        ),
        (
            Step().assign(0, SamplingParams(presence_penalty=1.0), [2, VOCAB_SIZE]),
            "tokens: got 50 at 1, want 0 to 49, or −1 − slot",
        ),
    ],
)
def test_slots_and_tokens_that_cannot_be_are_named(step: Step, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(Sampler(2, VOCAB_SIZE), zeros(len(step.slots), VOCAB_SIZE), step)


def test_a_step_without_outputs() -> None:
    result = run(Sampler(1, VOCAB_SIZE), zeros(0, VOCAB_SIZE), Step().assign(0, GREEDY, [2]))
    assert result.counts.shape == result.tokens.shape == (0,)


# The record


def test_the_largest_parameters_fit_the_record() -> None:
    params = SamplingParams(
        logit_bias=dict.fromkeys(range(1024), 1.0),
        allowed_token_ids=range(1024),
        stop_token_ids=range(64),
        min_tokens=3,
    )
    assert len(encode(params, 2**64 - 1, [EOS, *range(64)])) <= MAX_RECORD_WORDS


def test_a_record_of_another_version_is_refused() -> None:
    step = Step().assign(0, GREEDY, [2])
    step.words[0] = 9
    with pytest.raises(ValueError, match="sampling record: got version 9, want 1"):
        run(Sampler(1, VOCAB_SIZE), zeros(0, VOCAB_SIZE), step)

"""The step loop over a model too simple to be wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engines import ToyEngines, assert_conserved, run_all, toy_engine
from fastserve.core import CoreBug, RequestError
from fastserve.errors import ConfigError, EngineDeadError, KernelError
from fastserve.sampling_params import ParameterError, SamplingParams
from toy_runner import EOS, VOCAB_SIZE, ToyRunner, toy_answer, toy_logits

__all__ = ["toy_engine"]

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def prompts(num: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [
        generator.integers(3, VOCAB_SIZE, generator.integers(1, longest + 1)).tolist()
        for _ in range(num)
    ]


LIMITS = {
    "defaults": {},
    "two steps in flight": {"max_num_steps_in_flight": 2},
    "four steps in flight": {"max_num_steps_in_flight": 4},
    "one token a step": {"max_num_batched_tokens": 1},
    "small chunks": {"max_chunk_tokens": 7},
    "small chunks, two in flight": {"max_chunk_tokens": 7, "max_num_steps_in_flight": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "small pool": {"num_blocks": 12},
    "small pool, two in flight": {"num_blocks": 12, "max_num_steps_in_flight": 2},
    "three rows": {"max_num_seqs": 3, "max_num_steps_in_flight": 2},
}


@pytest.mark.parametrize("name", LIMITS)
def test_greedy_answers_are_the_models(toy_engine: ToyEngines, name: str) -> None:
    engine = toy_engine(**LIMITS[name])
    for _ in range(2):  # The second time with a warm prefix cache.
        requests = [engine.submit(prompt, GREEDY) for prompt in prompts(24)]
        run_all(engine)
        for request in requests:
            (sequence,) = request.output().outputs
            assert sequence.token_ids == toy_answer(request.prompt_token_ids, 12)
            ended = sequence.token_ids[-1] == EOS
            assert sequence.finish_reason == ("stop" if ended else "length")
            assert sequence.stop_reason is None
    if "small pool" in name:
        assert engine.stats()["num_preemptions"] > 0
    elif "no prefix" not in name:
        assert engine.stats()["prefix_cache_hits"] > 0


def test_sampled_answers_do_not_depend_on_company(toy_engine: ToyEngines) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.95, seed=11, max_tokens=10, frequency_penalty=0.5, n=2
    )
    answers = []
    for limits in LIMITS.values():
        engine = toy_engine(**limits)
        requests = [engine.submit(prompt, params) for prompt in prompts(8, seed=3)]
        run_all(engine)
        answers.append([[s.token_ids for s in request.sequences] for request in requests])
    assert all(answer == answers[0] for answer in answers[1:])
    assert answers[0][0][0] != answers[0][0][1]


def test_requests_without_a_seed_repeat_with_the_engines(toy_engine: ToyEngines) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

    def answers(seed: int) -> list[list[int]]:
        engine = toy_engine(seed=seed)
        requests = [engine.submit([5, 6, 7], params) for _ in range(3)]
        run_all(engine)
        return [request.sequences[0].token_ids for request in requests]

    first = answers(1)
    assert first == answers(1) != answers(2)
    assert first[0] != first[1]


def test_forks_share_the_prompt(toy_engine: ToyEngines) -> None:
    engine = toy_engine()
    prompt = prompts(1, seed=5)[0] * 2
    request = engine.submit(prompt, SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=6))
    run_all(engine)
    stats = engine.stats()
    assert stats["num_prompt_tokens"] == len(prompt), "the prompt is computed once"
    assert len({tuple(sequence.token_ids) for sequence in request.sequences}) > 1


# Ends


def test_stop_tokens(toy_engine: ToyEngines) -> None:
    engine = toy_engine(ToyRunner(eos_token_ids=[]))
    prompt = prompts(1, seed=8)[0]
    whole = toy_answer(prompt, 12, stop_token_ids=())
    stop = whole[5]
    kept = whole[: whole.index(stop) + 1]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
    request = engine.submit(prompt, params)
    run_all(engine)
    (sequence,) = request.output().outputs
    assert sequence.token_ids == kept
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", stop)


def test_ignore_eos_and_min_tokens(toy_engine: ToyEngines) -> None:
    engine = toy_engine()
    prompt = next(p for p in prompts(200, seed=9) if toy_answer(p, 3)[-1] == EOS)
    ignoring = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    later = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=9, min_tokens=6))
    run_all(engine)
    assert ignoring.sequences[0].token_ids == toy_answer(prompt, 9, stop_token_ids=())
    tokens = list(prompt)
    while len(tokens) < len(prompt) + 9:
        logits = toy_logits(tokens)
        if len(tokens) - len(prompt) < 6:
            logits[EOS] = -math.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == EOS:
            break
    assert later.sequences[0].token_ids == tokens[len(prompt) :]


def test_max_tokens_beyond_the_window_is_cut(toy_engine: ToyEngines) -> None:
    engine = toy_engine(max_model_len=32)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    unlimited = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    requests = [engine.submit([7] * 10, params), engine.submit([7] * 31, unlimited)]
    run_all(engine)
    assert [len(r.sequences[0].token_ids) for r in requests] == [22, 1]
    assert {r.sequences[0].finish_reason for r in requests} == {"length"}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_aborts_in_every_state(toy_engine: ToyEngines, in_flight: int) -> None:
    engine = toy_engine(max_num_seqs=4, max_num_steps_in_flight=in_flight, num_blocks=24)
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts(18, seed=4)]
    aborted = []
    for round_number, request in enumerate(requests[::3]):
        for _ in range(round_number):
            engine.step()
        if not request.finished:
            engine.abort(request)
            engine.abort(request)
            aborted.append(request)
    run_all(engine)
    assert len(aborted) >= 3
    for request in requests:
        (sequence,) = request.output().outputs
        whole = toy_answer(request.prompt_token_ids, 12)
        if request in aborted:
            assert sequence.finish_reason == "abort"
            assert sequence.token_ids == whole[: len(sequence.token_ids)]
        else:
            assert sequence.token_ids == whole


def test_priorities_run_first(toy_engine: ToyEngines) -> None:
    engine = toy_engine(scheduling_policy="priority", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    requests = [engine.submit([9, n + 3], params, priority=-n) for n in range(5)]
    assert run_all(engine) == requests[::-1]


# Log probabilities


def test_logprobs_and_prompt_logprobs(toy_engine: ToyEngines) -> None:
    engine = toy_engine(max_chunk_tokens=7, num_blocks=40)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    plain = [engine.submit(prompt, GREEDY) for prompt in prompts(6, seed=1)]
    request = engine.submit(plain[2].prompt_token_ids, params)
    run_all(engine)
    output = request.output()
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(entries) == len(tokens) - 1
    total = 0.0
    for position, entry in enumerate(entries, start=1):
        logits = toy_logits(tokens[:position]).astype(np.float64)
        wanted = logits - np.log(np.exp(logits).sum())
        num_best = 1 if position < len(output.prompt_token_ids) else 2
        best = np.argsort(-wanted, kind="stable")[:num_best].tolist()
        assert list(entry) == list(dict.fromkeys([tokens[position], *best]))
        for token, found in entry.items():
            assert found.logprob == pytest.approx(wanted[token], abs=1e-5)
            assert found.rank == 1 + int((wanted > wanted[token]).sum())
        if position >= len(output.prompt_token_ids):
            total += wanted[tokens[position]]
    assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-4)
    assert plain[0].output().outputs[0].logprobs is None
    assert plain[0].output().prompt_logprobs is None


@pytest.mark.parametrize("name", LIMITS)
def test_prompt_logprobs_under_any_limits(toy_engine: ToyEngines, name: str) -> None:
    """Several sequences a request, each given its own logprobs, whatever is preempted or cached."""
    engine = toy_engine(**LIMITS[name])
    params = SamplingParams(
        n=3, temperature=1.0, seed=4, max_tokens=9, logprobs=0, prompt_logprobs=0
    )
    requests = [engine.submit(prompt, params) for prompt in prompts(8, seed=12, longest=40) * 2]
    run_all(engine)
    for request in requests:
        output = request.output()
        prompt = output.prompt_token_ids
        scored = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
        assert scored == pytest.approx(oracle_logprobs(prompt, 1), abs=1e-5)
        for sequence in output.outputs:
            tokens = prompt + sequence.token_ids
            pairs = zip(sequence.token_ids, sequence.logprobs, strict=True)
            own = [entry[token].logprob for token, entry in pairs]
            assert own == pytest.approx(oracle_logprobs(tokens, len(prompt)), abs=1e-5)


def oracle_logprobs(tokens: list[int], first: int) -> list[float]:
    """Of ``tokens[first:]``."""
    found = []
    for position in range(first, len(tokens)):
        logits = toy_logits(tokens[:position]).astype(np.float64)
        found.append(logits[tokens[position]] - np.log(np.exp(logits).sum()))
    return found


def test_cached_tokens_are_reported(toy_engine: ToyEngines) -> None:
    engine = toy_engine()
    prompt = list(range(3, 43))
    first, _ = engine.submit(prompt, GREEDY), run_all(engine)
    second, _ = engine.submit(prompt, GREEDY), run_all(engine)
    other = engine.submit({"prompt_token_ids": prompt, "cache_salt": "mine"}, GREEDY)
    run_all(engine)
    cached = [request.output().num_cached_tokens for request in (first, second, other)]
    assert cached == [0, 32, 0]
    engine.reset_prefix_cache()
    third, _ = engine.submit(prompt, GREEDY), run_all(engine)
    assert third.output().num_cached_tokens == 0


def test_metrics(toy_engine: ToyEngines) -> None:
    engine = toy_engine()
    request = engine.submit([5] * 20, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert request.output().metrics.ttft_s is None
    run_all(engine)
    metrics = request.output().metrics
    assert 0 <= metrics.ttft_s <= metrics.latency_s
    assert metrics.num_generation_tokens == 4
    assert metrics.tokens_per_s > 0
    kinds = [event["kind"] for event in engine.timeline(request)]
    assert kinds == ["queued", "admitted", "first_token", "finished"]


# Failures


def test_a_poisoned_row_ends_its_request_alone(toy_engine: ToyEngines) -> None:
    runner = ToyRunner()
    engine = toy_engine(runner)
    runner.poison = lambda tokens: tokens[:2] == [50, 51] and len(tokens) > 22
    bad = engine.submit([50, 51] * 10, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    good = [engine.submit(prompt, GREEDY) for prompt in prompts(5, seed=2)]
    run_all(engine)
    output = bad.output()
    assert output.outputs[0].finish_reason == "error"
    assert output.error == "the model's logits are not finite"
    assert output.outputs[0].token_ids == toy_answer([50, 51] * 10, 3, ())
    for request in good:
        assert request.sequences[0].token_ids == toy_answer(request.prompt_token_ids, 12)


def test_a_row_with_every_token_masked(toy_engine: ToyEngines) -> None:
    engine = toy_engine()
    params = SamplingParams(temperature=0, allowed_token_ids=[EOS], min_tokens=2)
    request = engine.submit([5, 6], params)
    run_all(engine)
    assert request.output().error == (
        "every token is masked; allow more than the tokens that end a sequence"
    )


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_failed_step_is_computed_again(toy_engine: ToyEngines, in_flight: int) -> None:
    runner = ToyRunner()
    engine = toy_engine(runner, max_num_steps_in_flight=in_flight)

    def fail_sometimes(plan: object) -> None:
        if runner.num_forwards in {2, 5, 6, 9}:
            raise RuntimeError("a cosmic ray")

    runner.on_forward = fail_sometimes
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, presence_penalty=0.4)
    requests = [engine.submit(prompt, params) for prompt in prompts(6, seed=6)]
    run_all(engine)
    assert engine.stats()["num_failed_steps"] >= 4
    calm = toy_engine()
    wanted = [calm.submit(prompt, params) for prompt in prompts(6, seed=6)]
    run_all(calm)
    for request, same in zip(requests, wanted, strict=True):
        assert request.sequences[0].token_ids == same.sequences[0].token_ids


def test_a_request_whose_steps_always_fail_ends_with_error(toy_engine: ToyEngines) -> None:
    runner = ToyRunner()
    engine = toy_engine(runner)

    def fail(plan: object) -> None:
        raise RuntimeError("out of shared memory")

    runner.on_forward = fail
    request = engine.submit([5, 6, 7], GREEDY)
    run_all(engine)
    output = request.output()
    assert output.outputs[0].finish_reason == "error"
    assert output.error == "the step failed: out of shared memory"
    runner.on_forward = lambda plan: None
    again = engine.submit([5, 6, 7], GREEDY)
    run_all(engine)
    assert again.sequences[0].token_ids == toy_answer([5, 6, 7], 12)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_interrupt_in_a_step_leaves_the_engine_usable(
    toy_engine: ToyEngines, in_flight: int
) -> None:
    runner = ToyRunner()
    engine = toy_engine(runner, max_num_steps_in_flight=in_flight)

    def interrupt(plan: object) -> None:
        if runner.num_forwards == 3:
            raise KeyboardInterrupt

    runner.on_forward = interrupt
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts(4, seed=6)]
    with pytest.raises(KeyboardInterrupt):
        run_all(engine)
    run_all(engine)  # Nothing was lost.
    for request in requests:
        assert request.sequences[0].token_ids == toy_answer(request.prompt_token_ids, 12)


def test_a_dead_device_ends_everything(toy_engine: ToyEngines) -> None:
    runner = ToyRunner()
    engine = toy_engine(runner)

    def die(plan: object) -> None:
        raise KernelError("the device is lost")

    runner.on_forward = die
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts(3)]
    assert set(engine.step()) == set(requests)
    for request in requests:
        output = request.output()
        assert output.finished
        assert output.outputs[0].finish_reason == "error"
        assert output.error == "the engine stopped: the device is lost"
    assert not engine.is_alive
    assert not engine.has_work()
    for call in (engine.step, lambda: engine.submit([1], GREEDY), engine.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match="the engine stopped: the device is lost"):
            call()
    engine.abort(requests[0])
    engine.shutdown()


def test_a_bug_of_the_core_ends_everything(
    toy_engine: ToyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = toy_engine()

    class BrokenCore:
        def plan(self, now: int, arena: object) -> None:
            raise CoreBug("index out of bounds")

        def close(self) -> None:
            raise CoreBug("this Core stopped at a bug")

    request = engine.submit([5, 6], GREEDY)
    with monkeypatch.context() as broken:
        broken.setattr(engine._steps, "_core", BrokenCore())
        assert engine.step() == [request]
    engine._core.close()
    assert request.output().error == "the engine stopped: index out of bounds"
    with pytest.raises(EngineDeadError):
        engine.step()


# Requests


def test_duplicate_ids_are_refused_until_the_first_has_finished(toy_engine: ToyEngines) -> None:
    engine = toy_engine()
    first = engine.submit([5, 6], GREEDY, request_id="mine")
    assert engine.find("mine") is first
    with pytest.raises(RequestError) as refusal:
        engine.submit([5, 6], GREEDY, request_id="mine")
    assert str(refusal.value) == (
        "request id 'mine' is in use by a request that has not ended; choose another"
    )
    assert (refusal.value.code, refusal.value.http_status) == ("duplicate_request", 409)
    run_all(engine)
    assert engine.find("mine") is None
    engine.submit([5, 6], GREEDY, request_id="mine")
    run_all(engine)


def test_a_refused_request_leaves_no_trace(toy_engine: ToyEngines) -> None:
    engine = toy_engine()
    for _ in range(2):
        with pytest.raises(RequestError):
            engine.submit([], GREEDY, request_id="mine")
    assert engine.find("mine") is None
    assert engine.stats()["num_waiting"] == 0
    engine.submit([5], GREEDY, request_id="mine")
    run_all(engine)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"logit_bias": {97: 1.0}}, "logit_bias has token 97: want 0 to 96"),
        ({"stop_token_ids": [1000]}, "stop_token_ids has token 1000: want 0 to 96"),
        ({"allowed_token_ids": [3, 99]}, "allowed_token_ids has token 99: want 0 to 96"),
        ({"stop": "x"}, "stop: want stop_token_ids instead, the model has no tokenizer"),
    ],
)
def test_parameters_that_do_not_fit_the_model(
    toy_engine: ToyEngines, keywords: dict[str, object], message: str
) -> None:
    engine = toy_engine()
    with pytest.raises(ParameterError) as refusal:
        engine.submit([5], SamplingParams(**keywords))
    assert str(refusal.value) == message


def test_text_needs_a_tokenizer(toy_engine: ToyEngines) -> None:
    with pytest.raises(ParameterError, match="prompt is text: want token ids"):
        toy_engine().submit("hello", GREEDY)


def test_configurations_that_do_not_fit_the_model() -> None:
    engines = ToyEngines()
    with pytest.raises(ConfigError) as refusal:
        engines(max_model_len=257)
    assert str(refusal.value) == (
        "EngineConfig: max_model_len=257: want at most 256, the model's own limit"
    )


def test_limits_in_force(toy_engine: ToyEngines, caplog: pytest.LogCaptureFixture) -> None:
    engine = toy_engine(num_blocks=4, max_num_batched_tokens=8)
    assert engine.max_model_len == 32
    assert engine.core_config["max_num_seqs"] == 8
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == 2
    assert messages[0].startswith("max_model_len lowered from 256 to 32")


def test_shutdown_ends_requests_and_may_be_repeated(toy_engine: ToyEngines) -> None:
    engine = toy_engine(max_num_steps_in_flight=2)
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts(5)]
    engine.step()
    assert_conserved(engine)
    ended = engine.shutdown()
    assert engine.shutdown() == []
    assert {request.number for request in ended} >= {
        request.number for request in requests if not request.settled
    } - {request.number for request in requests if request.finished}
    for request in requests:
        assert request.finished
        assert request.sequences[0].finish_reason in {"abort", "stop", "length"}
    with pytest.raises(EngineDeadError, match="the engine is shut down; make a new one"):
        engine.submit([1], GREEDY)

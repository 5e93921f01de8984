"""Hypothesis drives the binding at random against a model that is too simple to be wrong.

The model of a sequence is what it must say (`expected_output`, a checksum of its prefix) and how
far it has come. The core, its device (`FakeModel`, whose memory is the tokens themselves) and the
model must agree after every operation, in any order of operations, with up to three steps in flight
over a pool that is too small for everybody.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from fake_model import FakeModel, expected_output
from fastserve.core import FINISH_REASONS, Arena, Core, RequestError, StepError, StepOutputs

VOCAB_SIZE = 11  # Small, so that prompts share prefixes and stop tokens are met.
MAX_MODEL_LEN = 24
NUM_BLOCKS = 9

PROMPTS = st.one_of(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12),
    st.integers(1, 14).map(lambda length: [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5][:length]),
)


@dataclass
class Sequence:
    """What one sequence must say, and how far it has come."""

    must_say: list[int]
    num_said: int = 0
    may_end: set[str] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)


@dataclass
class Live:
    """A request that has not ended, by sequence; ended ones are taken out."""

    prompt: list[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: set[int]
    sequences: dict[int, Sequence]


@dataclass
class Flight:
    """A step that was run and not committed."""

    step: int
    counts: NDArray[np.int32]
    tokens: NDArray[np.int32]
    who: list[tuple[int, int]]


class CoreWalk(RuleBasedStateMachine):
    """Every rule is something a user does; the invariants are what no user may ever see broken."""

    @initialize(
        in_flight=st.integers(1, 3),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([1, 5, 64]),
        output_rows=st.sampled_from([4, 6, 64]),
        chunk=st.sampled_from([None, 1, 3]),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", lambda candidate: -candidate.request_id]),
    )
    def build(self, in_flight, block_size, budget, output_rows, chunk, caching, policy) -> None:
        self.core = Core(
            num_blocks=NUM_BLOCKS * 4 // block_size,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_chunk_tokens=chunk,
            max_num_output_rows=output_rows,
            max_num_steps_in_flight=in_flight,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            max_num_step_failures=1_000,
            vocab_size=VOCAB_SIZE,
            max_wait_s=1e-6,  # A thousand operations.
        )
        self.inbox = self.core.inbox()
        self.arenas = deque(
            Arena(self.core.layout, self.core.plan_words) for _ in range(in_flight + 1)
        )
        self.namespaces: dict[int, int] = {}
        self.device = FakeModel(self.core, self.namespaces)
        self.live: dict[int, Live] = {}
        self.flights: deque[Flight] = deque()
        self.now = 0
        self.next_id = 1

    # What users do.

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 3),
        stops=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        num_sequences=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-2, 2),
        namespace=st.sampled_from([0, 0, 1]),
        score_prompt=st.booleans(),
    )
    def submit(
        self,
        prompt,
        max_tokens,
        min_tokens,
        stops,
        num_sequences,
        priority,
        namespace,
        score_prompt,
    ) -> None:
        request_id = self.next_id
        self.next_id += 1
        min_tokens = min(min_tokens, max_tokens)
        self.namespaces[request_id] = namespace
        self.inbox.submit(
            request_id,
            prompt,
            max_tokens=max_tokens,
            arrival=self.now,
            min_tokens=min_tokens,
            stop_token_ids=sorted(stops),
            num_sequences=num_sequences,
            priority=priority,
            score_prompt=score_prompt,
            namespace=namespace,
        )
        room = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        self.live[request_id] = Live(
            prompt=prompt,
            max_tokens=room,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            sequences={
                index: Sequence(expected_output(prompt, index, room, VOCAB_SIZE))
                for index in range(num_sequences)
            },
        )

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def submit_a_live_id_again(self, data) -> None:
        with pytest.raises(RequestError, match="is in use"):
            self.inbox.submit(self._pick(data), [1], max_tokens=1, arrival=self.now)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def abort(self, data) -> None:
        request_id = self._pick(data)
        assert self.inbox.abort(request_id)
        for sequence in self.live[request_id].sequences.values():
            sequence.may_end.add("abort")

    @rule()
    def abort_nobody(self) -> None:
        assert not self.inbox.abort(self.next_id)

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def finish_at_a_stop_string(self, data) -> None:
        request_id = self._pick(data)
        said = [item for item in self.live[request_id].sequences.items() if item[1].num_said > 0]
        if not said:
            return
        index, sequence = data.draw(st.sampled_from(said))
        kept = data.draw(st.integers(0, sequence.num_said))
        assert self.inbox.finish(request_id, index, "stop", kept)
        sequence.may_end.add("stop")
        sequence.kept.add(kept)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()

    @rule()
    def pause_and_resume(self) -> None:
        self.core.pause()
        if not self._is_full():
            assert self.core.plan(self.now, self.arenas[0].words).num_rows == 0
        self.core.resume()
        self._hear(self.core.take_outputs(), counts=None)

    # What the engine does.

    @rule()
    def plan(self) -> None:
        arena = self.arenas[0]
        if self._is_full():
            with pytest.raises(StepError, match="commit one first"):
                self.core.plan(self.now, arena.words)
            return
        self.now += 1
        sizes = self.core.plan(self.now, arena.words)
        if not sizes.is_step:
            self._hear(self.core.take_outputs(), counts=None)
            return
        self.arenas.rotate(-1)
        plan = arena.view(sizes)
        assert plan.num_tokens <= self.core.config["max_num_batched_tokens"]
        assert plan.num_rows <= 4
        assert plan.num_outputs <= self.core.config["max_num_output_rows"]
        counts, tokens = self.device.run(plan)
        self.flights.append(Flight(sizes.step, counts, tokens, self.device.who(plan)))

    @precondition(lambda self: self.flights)
    @rule()
    def commit(self) -> None:
        flight = self.flights.popleft()
        outputs = self.core.commit(flight.step, self.now, flight.counts, flight.tokens)
        self._hear(outputs, flight.counts)

    @precondition(lambda self: any(flight.who for flight in list(self.flights)[:1]))
    @rule(data=st.data())
    def commit_with_one_bad_row(self, data) -> None:
        flight = self.flights.popleft()
        row = data.draw(st.integers(0, len(flight.who) - 1))
        flight.counts[row] = -1
        request_id, index = flight.who[row]
        if request_id in self.live and index in self.live[request_id].sequences:
            self.live[request_id].sequences[index].may_end.add("error")
        outputs = self.core.commit(flight.step, self.now, flight.counts, flight.tokens)
        self._hear(outputs, flight.counts)

    @precondition(lambda self: len(self.flights) > 1)
    @rule()
    def commit_out_of_order(self) -> None:
        flight = self.flights[-1]
        with pytest.raises(StepError, match="cannot be committed now"):
            self.core.commit(flight.step, self.now, flight.counts, flight.tokens)

    @precondition(lambda self: self.flights)
    @rule()
    def fail(self) -> None:
        self._hear(self.core.fail(self.flights[0].step, self.now), counts=None)
        self.flights.clear()

    # What must hold.

    @invariant()
    def core_agrees_with_itself(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        stats = self.core.stats()
        assert stats["free"] + stats["held"] + stats["cached"] == stats["capacity"]
        assert stats["num_steps_in_flight"] == len(self.flights)
        if not self.core.has_work():
            assert stats["held"] == 0
            assert not self.live

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(2_000):
            if not self.core.has_work():
                break
            self.plan()
            while self.flights:
                self.commit()
        assert not self.core.has_work(), "somebody never ends"
        self.core_agrees_with_itself()

    # The model.

    def _is_full(self) -> bool:
        return len(self.flights) == self.core.config["max_num_steps_in_flight"]

    def _live(self) -> list[int]:
        """Those that the core has not ended, heard of or not."""
        return [request_id for request_id in self.live if self.inbox.is_live(request_id)]

    def _pick(self, data) -> int:
        return data.draw(st.sampled_from(self._live()))

    def _hear(self, outputs: StepOutputs, counts: NDArray[np.int32] | None) -> None:
        indptr = outputs.token_indptr.tolist()
        assert len(indptr) == len(outputs) + 1
        entries = zip(
            outputs.request_ids.tolist(),
            outputs.seq_indices.tolist(),
            outputs.source_rows.tolist(),
            outputs.finish_reasons.tolist(),
            outputs.num_output_tokens.tolist(),
            outputs.num_cached_tokens.tolist(),
            outputs.stop_tokens.tolist(),
            strict=True,
        )
        for at, (request_id, index, source, reason, num_output, num_cached, stop) in enumerate(
            entries
        ):
            request = self.live[request_id]
            sequence = request.sequences[index]
            tokens = outputs.tokens[indptr[at] : indptr[at + 1]].tolist()
            end = sequence.num_said + len(tokens)
            assert tokens == sequence.must_say[sequence.num_said : end]
            sequence.num_said = end
            if tokens:
                assert counts is not None
                assert counts[source] == 1
            assert num_cached < len(request.prompt)
            if reason == 0:
                assert tokens
                assert num_output == end
                continue
            self._ended(request, sequence, FINISH_REASONS[reason], num_output, stop)
            del request.sequences[index]
            if not request.sequences:
                del self.live[request_id]
                assert not self.inbox.is_live(request_id)

    def _ended(
        self, request: Live, sequence: Sequence, reason: str, num_output: int, stop: int
    ) -> None:
        """The sequence had a right to end like this."""
        said = sequence.must_say[: sequence.num_said]
        if reason == "stop" and stop >= 0:
            assert said[-1] == stop
            assert stop in request.stop_token_ids
            assert num_output == len(said) >= request.min_tokens
        elif reason == "stop":
            assert "stop" in sequence.may_end
            assert num_output in sequence.kept
        elif reason == "length":
            assert num_output == len(said) == request.max_tokens
        else:
            assert reason in sequence.may_end
        # Nobody runs past a stop token.
        counted = said[max(request.min_tokens, 1) - 1 : -1]
        assert request.stop_token_ids.isdisjoint(counted)


TestCoreWalk = CoreWalk.TestCase
TestCoreWalk.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def test_the_walk_would_notice_a_lost_copy(monkeypatch):
    """Without copy-on-write, forks overwrite each other: the walk must be able to see that."""
    monkeypatch.setattr(FakeModel, "_copy", lambda self, plan: None)
    quick = settings(TestCoreWalk.settings, max_examples=400, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CoreWalk, settings=quick)

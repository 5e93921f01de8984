"""Greedy answers against transformers, under any conditions.

The reference is computed once for each prompt, in float32, by transformers. An engine's tokens are
compared one by one, and so are their log probabilities. torch's matrix products are not bit-stable
over the number of rows, so where the reference's two best logits are nearer than :data:`TIE` either
token is right; what follows such a tie is compared with the reference after the same tokens. Ties
are counted and printed at the end of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers

from engines import assert_conserved
from fastserve.active_request import ActiveRequest
from fastserve.engine import Engine
from fastserve.outputs import RequestOutput
from fastserve.sampling_params import SamplingParams

TIE = 1e-4
LOGPROB_TOLERANCE = 1e-4
MAX_TIES = 1 / 1000  # Of all tokens compared.


@dataclass
class Tally:
    """What has been compared, by name of the comparison."""

    num_tokens: int = 0
    num_requests: int = 0
    ties: list[str] = field(default_factory=list)
    largest_difference: float = 0.0
    aborted_in: Counter[str] = field(default_factory=Counter)

    def lines(self, name: str) -> Iterator[str]:
        yield (
            f"{name}: {self.num_tokens} tokens of {self.num_requests} answers equal transformers', "
            f"{len(self.ties)} ties, logprobs within {self.largest_difference:.1e}"
        )
        if self.aborted_in:
            states = ", ".join(f"{n} {state}" for state, n in sorted(self.aborted_in.items()))
            yield f"{name}: aborted while {states}"
        yield from (f"{name}: tie: {tie}" for tie in sorted(set(self.ties))[:20])


TALLIES: dict[str, Tally] = {}
"""Printed by ``conftest.py`` at the end of a run."""


@dataclass(frozen=True)
class Answer:
    """What transformers says."""

    tokens: list[int]
    logprobs: list[float]


class Reference:
    """A model in transformers, and its answers so far.

    Args:
        model: In float32.
        eos_token_ids: Tokens that end an answer.
        name: Of the tally that comparisons go to.
    """

    def __init__(
        self, model: transformers.PreTrainedModel, eos_token_ids: Sequence[int], name: str
    ) -> None:
        self.model = model
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tally = TALLIES.setdefault(name, Tally())
        self._answers: dict[tuple[int, ...], Answer] = {}

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """The greedy answer to `prompt`, one token at a time over transformers' own cache."""
        known = self._answers.get(tuple(prompt), Answer([], []))
        if len(known.tokens) < max_tokens and not self._ends(known.tokens):
            known = self._answers[tuple(prompt)] = self._generate(prompt, max_tokens)
        return Answer(known.tokens[:max_tokens], known.logprobs[:max_tokens])

    @torch.inference_mode()
    def learn(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Answer many prompts, those of about one length together: padded on the left, masked."""
        left = sorted(prompts, key=len)
        while left:
            batch = [list(prompt) for prompt in left if len(prompt) <= len(left[0]) + 16]
            left = left[len(batch) :]
            longest = max(map(len, batch))
            padding = [longest - len(prompt) for prompt in batch]
            padded = [[0] * pad + prompt for pad, prompt in zip(padding, batch, strict=True)]
            mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
            result = self.model.generate(
                torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=sorted(self.eos_token_ids),
                pad_token_id=min(self.eos_token_ids),
                return_dict_in_generate=True,
                output_logits=True,
            )
            logprobs = torch.stack(result.logits, dim=1).log_softmax(2)
            for prompt, tokens, rows in zip(
                batch, result.sequences[:, longest:].tolist(), logprobs, strict=True
            ):
                ends = [at for at, token in enumerate(tokens, 1) if token in self.eos_token_ids]
                tokens = tokens[: min(ends, default=len(tokens))]
                values = [float(row[token]) for row, token in zip(rows, tokens, strict=False)]
                self._answers[tuple(prompt)] = Answer(tokens, values)

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        cache = transformers.DynamicCache(config=self.model.config)
        answer = Answer([], [])
        step = torch.tensor([list(prompt)])
        while len(answer.tokens) < max_tokens and not self._ends(answer.tokens):
            logits = self.model(step, cache=cache, logits_to_keep=1).logits[0, -1]
            answer.tokens.append(int(logits.argmax()))
            answer.logprobs.append(float(logits.log_softmax(0)[answer.tokens[-1]]))
            step = torch.tensor([answer.tokens[-1:]])
        return answer

    def _ends(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tokens[-1] in self.eos_token_ids

    def compare(self, output: RequestOutput, max_tokens: int, where: str = "") -> None:
        """Assert that a finished output is the reference's answer, or the beginning of it if it was
        aborted.
        """
        (ours,) = output.outputs
        prompt = output.prompt_token_ids
        theirs = self.answer(prompt, max_tokens)
        if ours.finish_reason != "abort":
            ended = self._ends(ours.token_ids)
            assert ended or len(ours.token_ids) == max_tokens, where
            assert ours.finish_reason == ("stop" if ended else "length"), where
        wanted = theirs.logprobs[: len(ours.token_ids)]
        if ours.token_ids != theirs.tokens[: len(ours.token_ids)]:
            wanted = self._forced(prompt, ours.token_ids, where)
        logprobs = [
            entry[token].logprob for token, entry in zip(ours.token_ids, ours.logprobs, strict=True)
        ]
        difference = np.abs(np.subtract(logprobs, wanted)).max(initial=0.0)
        assert difference < LOGPROB_TOLERANCE, f"{where}: logprobs differ by {difference:.1e}"
        self.tally.largest_difference = max(self.tally.largest_difference, float(difference))
        self.tally.num_tokens += len(ours.token_ids)
        self.tally.num_requests += 1

    @torch.inference_mode()
    def _forced(self, prompt: list[int], tokens: list[int], where: str) -> list[float]:
        """Log probabilities of `tokens`, each of which must be the best after those before it."""
        logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=1)
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        for at in torch.nonzero(best.indices != torch.tensor(tokens))[:, 0].tolist():
            gap = float(best.values[at] - chosen[at])
            tie = (
                f"token {at} after a prompt of {len(prompt)}: {tokens[at]} and "
                f"{int(best.indices[at])} are {gap:.1e} apart"
            )
            assert gap < TIE, f"{where}: {tie}"
            self.tally.ties.append(tie)
        picked = logits.log_softmax(1).gather(1, torch.tensor(tokens)[:, None])
        found: list[float] = picked[:, 0].tolist()
        return found


ABORT_STATES = ("waiting", "computing its prompt", "generating", "preempted", "any")


class Aborter:
    """Aborts requests, each when it reaches a state of its own."""

    def __init__(self, engine: Engine, seen: Counter[str]) -> None:
        self._engine = engine
        self._seen = seen
        self._wanted: list[tuple[ActiveRequest, str]] = []

    def add(self, request: ActiveRequest, number: int) -> None:
        self._wanted.append((request, ABORT_STATES[number % len(ABORT_STATES)]))

    def look(self) -> None:
        """Abort those whose state has come."""
        left = []
        for request, wanted in self._wanted:
            if request.finished:
                continue
            state = self._state(request)
            if wanted in (state, "any"):
                self._engine.abort(request)
                self._seen[state] += 1
            else:
                left.append((request, wanted))
        self._wanted = left

    def _state(self, request: ActiveRequest) -> str:
        kinds = [event["kind"] for event in self._engine.timeline(request)]
        if not kinds or kinds[-1] in ("queued", "leader_wait"):
            return "waiting"
        if kinds[-1] in ("preempted", "rolled_back"):
            return "preempted"
        return "generating" if request.num_generation_tokens else "computing its prompt"


def run_round(
    engine: Engine,
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    one_by_one: bool = False,
    priorities: Sequence[int] | None = None,
    aborts: int | None = None,
    where: str = "",
) -> list[RequestOutput]:
    """Answer `prompts` on `engine` and compare every answer. Returns the outputs.

    `aborts` has every third request aborted, and says in which of the states the first is.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0)
    aborter = Aborter(engine, reference.tally.aborted_in)
    requests = []
    for number, prompt in enumerate(prompts):
        priority = priorities[number] if priorities is not None else 0
        request = engine.submit(list(prompt), params, priority=priority)
        requests.append(request)
        if aborts is not None and number % 3 == 2:
            aborter.add(request, number // 3 + aborts)
            aborter.look()
        if one_by_one:
            _run_until_idle(engine, aborter)
    _run_until_idle(engine, aborter)
    outputs = [request.output() for request in requests]
    for output in outputs:
        reference.compare(output, max_tokens, where)
    return outputs


def _run_until_idle(engine: Engine, aborter: Aborter) -> None:
    while engine.has_work():
        engine.step()
        aborter.look()
    assert_conserved(engine)

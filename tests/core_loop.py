"""A core, its arena and a fake model, stepped by hand: for tests of the binding."""

from __future__ import annotations

from fake_model import FakeModel
from fastserve.core import Arena, Core, PlanSizes, StepOutputs

VOCAB_SIZE = 100


def make_core(**keywords) -> Core:
    small = {"num_blocks": 16, "block_size": 4, "max_model_len": 32, "max_num_seqs": 4}
    return Core(**(small | {"vocab_size": VOCAB_SIZE} | keywords))


class Loop:
    """One core with small limits; keywords are the core's."""

    def __init__(self, **keywords) -> None:
        self.core = make_core(**keywords)
        self.inbox = self.core.inbox()
        self.arena = Arena(self.core.layout, self.core.plan_words)
        self.model = FakeModel(self.core)
        self.now = 0

    def submit(self, request_id=1, prompt=(1, 2, 3), **keywords) -> None:
        self.inbox.submit(request_id, prompt, **({"max_tokens": 4, "arrival": 0} | keywords))

    def plan(self) -> PlanSizes:
        self.now += 1
        return self.core.plan(self.now, self.arena.words)

    def step(self) -> StepOutputs:
        sizes = self.plan()
        if not sizes.is_step:
            return self.core.take_outputs()
        counts, tokens = self.model.run(self.arena.view(sizes))
        return self.core.commit(sizes.step, self.now, counts, tokens)

    def run(self) -> dict[tuple[int, int], list[int]]:
        """Every sequence's tokens, when all have ended."""
        said: dict[tuple[int, int], list[int]] = {}
        while self.core.has_work():
            outputs = self.step()
            starts = outputs.token_indptr.tolist()
            names = zip(outputs.request_ids.tolist(), outputs.seq_indices.tolist(), strict=True)
            for at, name in enumerate(names):
                said.setdefault(name, []).extend(outputs.tokens[starts[at] : starts[at + 1]])
        self.core.check()
        return said

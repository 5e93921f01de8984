"""transformers' ``generate`` over padded batches: what most people have."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from peers.engines import BatchEngine, Reports
from peers.workloads import Request

PADDING_TOKEN = 2


class Transformers(BatchEngine):
    def start(self) -> None:
        torch.set_num_threads(self.options["threads"])
        dtype = self.options["dtype"]
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            self.options["model"], dtype=getattr(torch, dtype)
        )
        self.version = (
            f"transformers {transformers.__version__} (torch {torch.__version__}, {dtype})"
        )

    def submit_batch(self, requests: list[Request]) -> None:
        size = self.options["batch_size"]
        for begin in range(0, len(requests), size):
            self._answer(requests[begin : begin + size])

    def _answer(self, requests: list[Request]) -> None:
        longest = max(len(request.prompt) for request in requests)
        num_missing = [longest - len(request.prompt) for request in requests]
        ids = [
            [PADDING_TOKEN] * missing + request.prompt
            for missing, request in zip(num_missing, requests, strict=True)
        ]
        mask = [[0] * missing + [1] * (longest - missing) for missing in num_missing]
        num_tokens = max(request.num_tokens for request in requests)
        with torch.inference_mode():
            self._model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=PADDING_TOKEN,
                stopping_criteria=StoppingCriteriaList([_Clock(requests, self.recorder)]),
            )


class _Clock(StoppingCriteria):
    """Stops nothing: ``generate`` asks after each token, and has no streamer for batches."""

    def __init__(self, requests: list[Request], reports: Reports) -> None:
        self._requests = requests
        self._reports = reports
        self._num_steps = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._num_steps += 1
        for request in self._requests:
            if self._num_steps <= request.num_tokens:
                self._reports.tokens(request.name, 1)
            if self._num_steps == request.num_tokens:
                self._reports.finished(request.name)
        return torch.zeros(len(self._requests), dtype=torch.bool)

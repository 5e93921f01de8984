"""openvino-genai's ContinuousBatchingPipeline, stepped by a thread here."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from peers.engines import OnlineEngine, Reports
from peers.workloads import Request


@dataclass(slots=True)
class _Live:
    request: Request
    reports: Reports
    handle: Any
    num_tokens: int = 0


class OpenVino(OnlineEngine):
    def start(self) -> None:
        scheduler = genai.SchedulerConfig()
        for name, value in self.options["scheduler"].items():
            setattr(scheduler, name, value)
        properties = {
            "INFERENCE_NUM_THREADS": self.options["threads"],
            **self.options.get("properties", {}),
        }
        self._pipeline = genai.ContinuousBatchingPipeline(
            self.options["model"], scheduler, "CPU", properties
        )
        self.version = f"openvino-genai {genai.__version__}"
        self._num_submitted = 0
        self._new: list[tuple[Request, Reports]] = []
        self._live: list[_Live] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._step_for_ever, daemon=True).start()

    def submit(self, request: Request) -> None:
        with self._changed:
            self._new.append((request, self.recorder))
            self._changed.notify()

    def _step_for_ever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._new or self._live)
                new, self._new = self._new, []
            try:
                for request, reports in new:
                    self._live.append(_Live(request, reports, self._add(request)))
                self._pipeline.step()
            except Exception as error:
                self._fail_all(repr(error))
                continue
            self._report()

    def _add(self, request: Request) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.num_tokens
        config.min_new_tokens = request.num_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._num_submitted += 1
        ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        return self._pipeline.add_request(self._num_submitted, ids, config)

    def _report(self) -> None:
        for live in self._live:
            count = 0
            while live.handle.can_read():
                count += sum(len(output.generated_ids) for output in live.handle.read().values())
            live.num_tokens += count
            live.reports.tokens(live.request.name, count)
            if live.num_tokens >= live.request.num_tokens:
                live.reports.finished(live.request.name)
        self._live = [live for live in self._live if live.num_tokens < live.request.num_tokens]
        if self._live and not self._pipeline.has_non_finished_requests():
            self._fail_all("the pipeline ended early")

    def _fail_all(self, message: str) -> None:
        for live in self._live:
            live.reports.failed(live.request.name, message)
        self._live = []

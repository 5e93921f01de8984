"""vLLM through its own asynchronous engine; the core of it is a child process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from peers.engines import StreamingEngine
from peers.workloads import Request


class Vllm(StreamingEngine):
    def start(self) -> None:
        keywords: dict[str, Any] = {
            "model": self.options["model"],
            "dtype": self.options["dtype"],
            "disable_log_stats": True,
            **self.options["keywords"],
        }

        async def make() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**keywords))

        self.engine = asyncio.run_coroutine_threadsafe(make(), self.loop).result()
        self.version = f"vllm {vllm.__version__} (torch {torch.__version__}, {keywords['dtype']})"

    async def stream(self, request: Request) -> AsyncIterator[int]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.num_tokens,
            min_tokens=request.num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt}
        async for output in self.engine.generate(prompt, params, request.name):
            yield len(output.outputs[0].token_ids)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.engine.shutdown)

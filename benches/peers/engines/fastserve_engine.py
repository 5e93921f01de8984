"""fastserve through ``AsyncEngine``, with its defaults but for the number of threads.

Prompts are token ids and no peer makes text of its answers, so the tokenizer is left out here too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastserve import AsyncEngine, SamplingParams, __version__
from peers.engines import StreamingEngine
from peers.workloads import Request

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "q8_0": {},  # The GGUF file as it is.
}


class Fastserve(StreamingEngine):
    def start(self) -> None:
        keywords = {
            **PRECISIONS[self.options["precision"]],
            "num_threads": self.options["threads"],
            "skip_tokenizer_init": True,
            **self.options.get("keywords", {}),
        }
        self.engine = AsyncEngine(self.options["model"], progress=False, **keywords)
        self.version = f"fastserve {__version__}"

    async def stream(self, request: Request) -> AsyncIterator[int]:
        params = SamplingParams(temperature=0.0, max_tokens=request.num_tokens, ignore_eos=True)
        seen = 0
        async for output in self.engine.generate(
            {"prompt_token_ids": request.prompt}, params, request.name
        ):
            if output.error is not None:
                raise RuntimeError(output.error)
            total = len(output.outputs[0].token_ids)
            yield total - seen
            seen = total

    def stop(self) -> None:
        self.engine.shutdown()

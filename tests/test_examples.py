"""The examples that need a model, over a small one. (The scheduler's is run with its binding.)"""

from __future__ import annotations

import runpy
from pathlib import Path

from fastapi.testclient import TestClient

import model_factory
from fastserve import LLM, SamplingParams


def test_the_async_example_streams_an_answer(repository: Path, tmp_path: Path) -> None:
    folder = model_factory.make("llama", tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM(folder, progress=False, num_blocks=64) as llm:
        (wanted,) = llm.chat([{"role": "user", "content": "hi"}], params)
    example = runpy.run_path(str(repository / "examples" / "serve_async.py"))
    names = example["lifespan"].__wrapped__.__globals__
    names |= {"MODEL": folder, "PARAMS": params}
    with TestClient(example["app"]) as client:
        answer = client.get("/ask", params={"question": "hi"})
    assert answer.text == wanted.outputs[0].text
    assert answer.headers["content-type"].startswith("text/plain")

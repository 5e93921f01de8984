"""The real model behind the front ends: text in, text out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from engines import assert_conserved
from fastserve import LLM, AsyncEngine, SamplingParams

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", num_blocks=256, num_threads=1) as llm:
        yield llm
        assert_conserved(llm.engine)


def test_text_in_text_out(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    assert output.outputs[0].text.startswith(" Paris")
    assert llm.tokenizer.decode(output.prompt_token_ids) == PROMPT


def test_chat_ends_by_itself(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
    (answer,) = output.outputs
    assert "4" in answer.text
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.token_ids[-1] == 2
    assert "<|im_end|>" not in answer.text


def test_several_sequences_share_the_prompt(llm: LLM) -> None:
    before = llm.stats()["num_prompt_tokens"]
    prompt = "Once upon a time, in a land far away, there was a"
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=12)
    (output,) = llm.generate(prompt, params)
    assert len({choice.text for choice in output.outputs}) == 4
    assert llm.stats()["num_prompt_tokens"] - before == len(output.prompt_token_ids)
    (again,) = llm.generate(prompt, params)
    assert [c.text for c in again.outputs] == [c.text for c in output.outputs]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, stop=["\n"])
    (output,) = llm.generate(PROMPT, params)
    assert output.outputs[0].stop_reason == "\n"
    assert "\n" not in output.outputs[0].text


def test_streamed_text_equals_the_whole(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    prompt = "Some emoji and Chinese: 😀 你好"
    texts = [output.outputs[0].text for output in llm.stream(prompt, params)]
    assert all("\N{REPLACEMENT CHARACTER}" not in text for text in texts[:-1])
    assert texts[-1] == llm.generate(prompt, params)[0].outputs[0].text


def test_the_async_front_end_gives_the_same(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=8)
    prompts = [PROMPT, "Water boils at", "def add(a, b):"]
    wanted = [output.outputs[0].text for output in llm.generate(prompts, params)]

    async def answer(engine: AsyncEngine, prompt: str) -> str:
        async for output in engine.generate(prompt, params):
            text = output.outputs[0].text
        return text

    async def main() -> list[str]:
        async with AsyncEngine("smollm2", dtype="float32", num_blocks=64, num_threads=1) as engine:
            return await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))

    assert asyncio.run(main()) == wanted

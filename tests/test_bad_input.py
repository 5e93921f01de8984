"""What a user can get wrong: the whole text of every refusal, and that the engine goes on.

A text names the value, the limit and what to do.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gguf_factory
import model_factory
from engines import assert_conserved
from fastserve.async_engine import AsyncEngine
from fastserve.errors import FastserveError
from fastserve.llm import LLM
from fastserve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_factory.make("llama", tmp_path_factory.mktemp("bad_input"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, num_blocks=64, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(llm: LLM) -> list[int]:
    return llm.generate("the quick", GREEDY)[0].outputs[0].token_ids


@pytest.fixture
def refuses(llm: LLM, answer: list[int]) -> Iterator[Callable[[Callable[[], object]], str]]:
    """Call something that must be refused, and get the text. Afterwards the engine still serves."""

    def refuse(call: Callable[[], object]) -> str:
        with pytest.raises((FastserveError, TypeError)) as refusal:
            call()
        return str(refusal.value)

    yield refuse
    assert llm.generate("the quick", GREEDY)[0].outputs[0].token_ids == answer
    assert_conserved(llm.engine)


Refuses = Callable[[Callable[[], object]], str]


# Prompts


def test_empty_prompt(llm: LLM, refuses: Refuses) -> None:
    for empty in ("", [[]], {"prompt_token_ids": []}):
        assert refuses(lambda prompt=empty: llm.generate(prompt)) == (
            "prompt is empty; a request needs at least one token"
        )


def test_token_id_out_of_range(llm: LLM, refuses: Refuses) -> None:
    assert refuses(lambda: llm.generate([[5, 6, 320]])) == (
        "token id 320 at position 2 is outside the vocabulary of 320 (0 to 319)"
    )
    assert refuses(lambda: llm.generate([[5, -1]])) == (
        "token id -1 at position 1 is outside the vocabulary of 320 (0 to 319)"
    )
    assert refuses(lambda: llm.generate([[2**40]])) == (
        "token id 1099511627776 at position 0 is outside the vocabulary of 320 (0 to 319)"
    )


def test_prompt_longer_than_the_model(llm: LLM, refuses: Refuses) -> None:
    assert refuses(lambda: llm.generate([[5] * 512])) == (
        "prompt has 512 tokens; with one to generate that is more than max_model_len=512; "
        "shorten the prompt"
    )
    assert len(llm.generate([[5] * 511], GREEDY)[0].outputs[0].token_ids) == 1


def test_prompt_larger_than_the_whole_pool(folder: Path, refuses: Refuses) -> None:
    with LLM(folder, num_blocks=4, **OPTIONS) as small:
        assert refuses(lambda: small.generate([[5] * 64])) == (
            "prompt has 64 tokens; with one to generate that is more than max_model_len=64; "
            "shorten the prompt, or give the KV pool more blocks"
        )
        (output,) = small.generate([[5] * 63], GREEDY)
        assert output.outputs[0].finish_reason in {"length", "stop"}
        assert_conserved(small.engine)


# Parameters


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_max_tokens_below_one(refuses: Refuses, max_tokens: int) -> None:
    assert refuses(lambda: SamplingParams(max_tokens=max_tokens)) == (
        f"max_tokens={max_tokens}: want at least 1, or None for up to the model's length"
    )


def test_max_tokens_beyond_the_window_is_cut(llm: LLM, refuses: Refuses) -> None:
    params = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)
    (output,) = llm.generate([[5] * 500], params)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"


def test_nan_temperature(refuses: Refuses) -> None:
    assert refuses(lambda: SamplingParams(temperature=math.nan)) == (
        "temperature=nan: want a finite number, 0 or more"
    )


def test_65_stop_strings(llm: LLM, refuses: Refuses) -> None:
    assert refuses(lambda: SamplingParams(stop=[f"stop {n}" for n in range(65)])) == (
        "stop=65 strings: want at most 64; leave some out"
    )
    llm.generate("x", SamplingParams(stop=[f"stop {n}" for n in range(64)], max_tokens=2))


def test_duplicate_request_id(llm: LLM, refuses: Refuses) -> None:
    first = llm.engine.submit([5, 6], GREEDY, request_id="mine")
    assert refuses(lambda: llm.engine.submit([5, 6], GREEDY, request_id="mine")) == (
        "request id 'mine' is in use by a request that has not ended; choose another"
    )
    while not first.settled:
        llm.engine.step()


def test_too_many_sequences(llm: LLM, refuses: Refuses) -> None:
    assert refuses(lambda: llm.generate("x", SamplingParams(n=129))) == "n=129: want 1 to 128"


def test_unknown_keywords(folder: Path, llm: LLM, refuses: Refuses) -> None:
    assert refuses(lambda: SamplingParams(max_token=5)) == (
        "SamplingParams has no keyword 'max_token'; did you mean 'max_tokens'?"
    )
    assert refuses(lambda: LLM(folder, max_num_batch_tokens=5)) == (
        "LLM has no keyword 'max_num_batch_tokens'; did you mean 'max_num_batched_tokens'?"
    )
    assert refuses(lambda: AsyncEngine(folder, blocksize=5)) == (
        "AsyncEngine has no keyword 'blocksize'; did you mean 'block_size'?"
    )
    assert refuses(lambda: llm.generate({"prompt": "x", "cachesalt": "y"})) == (
        "a prompt has no keyword 'cachesalt'; did you mean 'cache_salt'?"
    )


def test_many_bad_options_at_once(folder: Path, refuses: Refuses) -> None:
    assert refuses(lambda: LLM(folder, block_size=12, num_blocks=0, max_num_seqs=True)) == (
        "EngineConfig: block_size=12: want 8, 16, 32; max_num_seqs=True: want 1 to 1048576; "
        "num_blocks=0: want 1 to 1073741824, or None for the default"
    )
    assert refuses(lambda: LLM(folder, max_model_len=513, **OPTIONS)) == (
        "EngineConfig: max_model_len=513: want at most 512, the model's own limit"
    )


# Models

MEND = "the file has N; download or copy it again"


def load(path: Path | str) -> Callable[[], object]:
    return lambda: LLM(path, **OPTIONS)


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def readable(text: str, folder: Path) -> str:
    """A text without what differs from run to run, and file sizes, which follow transformers."""
    text = text.replace(str(folder), "TMP")
    return re.sub(r"(byte|has|is|needs|of) \d+", r"\1 N", text)


def test_unknown_model_path(tmp_path: Path, refuses: Refuses) -> None:
    wanted = (
        "no such file or folder; want a folder with config.json and safetensors, a .gguf file, a "
        "hub id (owner/name) or 'smollm2'"
    )
    text = refuses(load(tmp_path / "nothing"))
    assert readable(text, tmp_path) == f"model 'TMP/nothing': {wanted}"
    assert refuses(load("no such model")) == f"model 'no such model': {wanted}"


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (0, "not a safetensors file, or a corrupt one"),
        (4, "not a safetensors file, or a corrupt one"),
        (100, f"truncated: the header ends at byte N, {MEND}"),
        (
            300_000,
            f"truncated: tensor model.layers.1.mlp.gate_proj.weight ends at byte N, {MEND}",
        ),
    ],
)
def test_truncated_safetensors(
    folder: Path, tmp_path: Path, refuses: Refuses, size: int, wanted: str
) -> None:
    broken = copy_of(folder, tmp_path)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert readable(refuses(load(broken)), tmp_path) == f"TMP/model/model.safetensors: {wanted}"


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (0, "0 bytes are too few for a GGUF file"),
        (4, "4 bytes are too few for a GGUF file"),
        (
            100,
            f"truncated: the header reaches beyond byte N, {MEND}",
        ),
        (
            300_000,
            f"truncated: tensor blk.1.ffn_gate.weight ends at byte N, {MEND}",
        ),
    ],
)
def test_truncated_gguf(
    folder: Path, tmp_path: Path, refuses: Refuses, size: int, wanted: str
) -> None:
    file = gguf_factory.convert(folder, tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:size])
    assert readable(refuses(load(file)), tmp_path) == f"TMP/model.gguf: {wanted}"


def test_unsupported_architecture(folder: Path, tmp_path: Path, refuses: Refuses) -> None:
    other = copy_of(folder, tmp_path)
    settings = json.loads((other / "config.json").read_text())
    settings |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (other / "config.json").write_text(json.dumps(settings))
    assert readable(refuses(load(other)), tmp_path) == (
        "TMP/model/config.json: architecture MambaForCausalLM is not supported; the supported ones "
        "are llama, mistral, qwen2, qwen3"
    )


def test_tokenizer_without_chat_template(folder: Path, tmp_path: Path, refuses: Refuses) -> None:
    plain = copy_of(folder, tmp_path)
    model_factory.write_tokenizer(plain, chat_template=None)
    with LLM(plain, num_blocks=16, **OPTIONS) as llm:
        text = refuses(lambda: llm.chat([{"role": "user", "content": "hi"}]))
        assert readable(text, tmp_path) == (
            "TMP/model: the model has no chat template, so it takes prompts and not messages; use "
            "generate, or /v1/completions, or an instruction-tuned model"
        )
        assert llm.generate("the quick", GREEDY)[0].finished


# The same through the asynchronous front end


def test_refusals_of_the_async_engine(folder: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(folder, num_blocks=64, **OPTIONS) as engine:

            async def serve(prompt: object, **options: Any) -> str:
                async for output in engine.generate(prompt, GREEDY, **options):
                    text = output.outputs[0].text
                return text

            wanted = await serve("the quick")
            for prompt, message in (
                ("", "prompt is empty"),
                ([5, 320], "token id 320 at position 1"),
                ([5] * 600, "prompt has 600 tokens"),
            ):
                with pytest.raises(FastserveError, match=message):
                    await serve(prompt)
                assert await serve("the quick") == wanted

    asyncio.run(main())

"""SmolLM2, the model that needs no hub, against transformers reading the same file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import model_factory
import packed_rows
from fastserve.models.resolve import ModelSource, resolve
from fastserve.runner import CpuRunner
from fastserve.text.tokenizer import Tokenizer
from plans import PlanBuilder, Row, drive

TIE = 1e-4  # Where the two best logits are nearer than this, either token is right.


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve("smollm2")


@pytest.fixture(scope="module")
def reference(source) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def runner(source) -> CpuRunner:
    return CpuRunner.load(source, dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def prompts(source) -> list[list[int]]:
    tokenizer = Tokenizer.from_source(source)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Name three colours."}])
    texts = ["The capital of France is", "def add(a, b):\n    return", "Größe 你好 12345"]
    return [chat, *map(tokenizer.encode, texts)]


def test_every_weight_equals_transformers(runner, reference):
    """To the last bit: the same numbers, in rows of our order."""
    config, weights = runner.config, runner.weights

    def numbers(matrix):
        return torch.from_numpy(packed_rows.as_floats(matrix))

    assert torch.equal(numbers(weights.embedding), reference.model.embed_tokens.weight)
    assert weights.lm_head is weights.embedding
    assert torch.equal(torch.from_numpy(weights.norm), reference.model.norm.weight)
    sizes = [config.q_size, config.kv_size, config.kv_size]
    for ours, theirs in zip(weights.layers, reference.model.layers, strict=True):
        q, k, v = numbers(ours.qkv).split(sizes)
        assert torch.equal(q, theirs.self_attn.q_proj.weight)
        assert torch.equal(k, theirs.self_attn.k_proj.weight)
        assert torch.equal(v, theirs.self_attn.v_proj.weight)
        assert torch.equal(numbers(ours.output), theirs.self_attn.o_proj.weight)
        gate, up = numbers(ours.gate_up).chunk(2)
        assert torch.equal(gate, theirs.mlp.gate_proj.weight)
        assert torch.equal(up, theirs.mlp.up_proj.weight)
        assert torch.equal(numbers(ours.down), theirs.mlp.down_proj.weight)
        assert torch.equal(torch.from_numpy(ours.attention_norm), theirs.input_layernorm.weight)
        assert torch.equal(torch.from_numpy(ours.mlp_norm), theirs.post_attention_layernorm.weight)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_in_the_format_of_the_file_are_counted_as_they_are(source, dtype):
    """135 million numbers: four bits and two scales of 32 each, or four bytes."""
    num_bytes = CpuRunner.load(source, dtype=dtype).weight_bytes
    assert num_bytes < 110e6 if dtype == "auto" else num_bytes > 500e6


@torch.inference_mode()
def test_logprobs_equal_transformers(runner, reference, prompts):
    got = drive(runner, PlanBuilder(), prompts, lambda step, sequence: 8 + 16 * sequence)
    for tokens, ours in zip(prompts, got, strict=True):
        theirs = reference(torch.tensor([tokens])).logits[0]
        difference = torch.from_numpy(ours).log_softmax(1) - theirs.log_softmax(1)
        assert difference.abs().max() < 1e-4


@torch.inference_mode()
def test_greedy_tokens_equal_transformers(runner, reference, prompts):
    num_tokens = 24
    builder = PlanBuilder()
    builder.give_kv_to(runner)
    last_samples = np.zeros(8, dtype=np.int32)
    rows = [Row(slot=slot, tokens=tokens) for slot, tokens in enumerate(prompts)]
    generated = [list(tokens) for tokens in prompts]
    for _ in range(num_tokens):
        picked = runner.forward(builder.plan(rows), last_samples).argmax(axis=1).tolist()
        last_samples[: len(picked)] = picked
        rows = []
        for slot, token in enumerate(picked):
            rows.append(Row(slot=slot, tokens=[-1 - slot], start=len(generated[slot])))
            generated[slot].append(token)
    for prompt, ours in zip(prompts, generated, strict=True):
        logits = reference(torch.tensor([ours])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        chosen = logits.gather(1, torch.tensor(ours[len(prompt) :])[:, None])[:, 0]
        wrong = (chosen < best[:, 0]) & (best[:, 0] - chosen > TIE)
        assert not wrong.any(), f"at {wrong.nonzero().flatten().tolist()}"


def test_the_files_facts(runner, source):
    assert runner.vocab_size == 49152
    assert runner.config.eos_token_ids == (2,)
    assert runner.config.max_positions == 8192
    assert runner.weight_bytes == 4 * 134_515_008
    assert runner.kv_bytes_per_block(16) == 30 * 16 * 2 * 3 * 64 * 4
    assert model_factory.reference_tokenizer(source.path).vocab_size == runner.vocab_size

"""The architecture record, from ``config.json`` in both spellings and with every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import model_factory
from fastserve.errors import ModelError
from fastserve.models.config import DecoderConfig, RopeConfig
from fastserve.models.hf_config import config_from_folder
from fastserve.models.rope import rope_table

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def read(folder: Path, values: dict[str, Any], **changes: Any) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(values | changes))
    return config_from_folder(folder)


def test_defaults_of_llama(tmp_path):
    assert read(tmp_path, LLAMA) == DecoderConfig(
        family="llama",
        vocab_size=320,
        hidden_size=64,
        num_layers=3,
        num_q_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=96,
        norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(0, 0, 0),
        tied_embeddings=False,
        attention_scale=0.25,
        max_positions=512,
        eos_token_ids=(2,),
        bos_token_id=None,
    )


def test_both_spellings_of_rope_are_one(tmp_path):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    new = read(
        tmp_path, LLAMA, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | scaling
    )
    old = read(tmp_path, LLAMA, rope_theta=5e5, rope_scaling={"rope_type": "llama3"} | scaling)
    oldest = read(tmp_path, LLAMA, rope_theta=5e5, rope_scaling={"type": "llama3"} | scaling)
    assert new == old == oldest
    assert new.rope == RopeConfig(
        theta=5e5,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=64,
    )
    assert read(tmp_path, LLAMA, rope_scaling=None).rope.kind == "default"


@pytest.mark.parametrize("name", ["llama", "llama3", "llama-linear"])
def test_angles_equal_transformers(name, tmp_path):
    folder = model_factory.make(name, tmp_path)
    config = config_from_folder(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).model
    cos, sin = model.rotary_emb(torch.ones(1), torch.arange(500)[None])
    half = config.head_dim // 2
    table = rope_table(config.rope, config.head_dim, 500)
    # Angles are the same float32; their cosines are rounded here, and within a unit there.
    for ours, theirs in ((table[:, :half], cos), (table[:, half:], sin)):
        np.testing.assert_allclose(ours, theirs[0, :, :half], rtol=0, atol=2**-24)


@pytest.mark.parametrize("name", model_factory.VARIANTS)
def test_records_agree_with_transformers(name, tmp_path):
    folder = model_factory.make(name, tmp_path)
    ours = config_from_folder(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs, layers = model.config, model.model.layers
    assert ours.head_dim == layers[0].self_attn.head_dim
    assert ours.attention_scale == layers[0].self_attn.scaling
    assert ours.qkv_bias == (layers[0].self_attn.q_proj.bias is not None)
    assert ours.output_bias == (layers[0].self_attn.o_proj.bias is not None)
    assert ours.mlp_bias == (layers[0].mlp.down_proj.bias is not None)
    assert ours.qk_norm == hasattr(layers[0].self_attn, "q_norm")
    assert ours.tied_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    windows = [getattr(layer.self_attn, "sliding_window", None) or 0 for layer in layers]
    if ours.family == "mistral":
        windows = [theirs.sliding_window] * len(layers)
    assert list(ours.windows) == windows
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_windows_of_mistral_and_qwen(tmp_path):
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert read(tmp_path, mistral, sliding_window=None).windows == (0, 0, 0)
    assert read(tmp_path, mistral).windows == (4096,) * 3, "transformers' default"
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}
    assert read(tmp_path, qwen).windows == (0, 0, 0)
    used = qwen | {"use_sliding_window": True}
    assert read(tmp_path, used, max_window_layers=2).windows == (0, 0, 9)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(tmp_path, used, layer_types=types).windows == (9, 0, 9)


def test_end_tokens_come_from_the_generation_settings(tmp_path):
    settings = tmp_path / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [7, 9, 7]}))
    assert read(tmp_path, LLAMA).eos_token_ids == (7, 9)
    settings.write_text(json.dumps({"eos_token_id": 5}))
    assert read(tmp_path, LLAMA).eos_token_ids == (5,)
    settings.write_text("{}")
    assert read(tmp_path, LLAMA).eos_token_ids == (2,)
    assert read(tmp_path, LLAMA, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture GemmaForCausalLM is not supported; the supported ones are llama, "
            "mistral, qwen2, qwen3",
        ),
        (
            {"architectures": None, "model_type": "mamba"},
            "architecture mamba is not supported; the supported ones are llama, mistral, qwen2, "
            "qwen3",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type='yarn' is not supported; the supported ones are default, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type='linear' without factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "weights quantized with 'awq' are not supported; take the original checkpoint or a "
            "GGUF file",
        ),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size='64': want int"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes': want true or false"),
        ({"architectures": {"a": 1}}, "architectures={'a': 1}: want a list of class names"),
        ({"architectures": 1.5}, "architectures=1.5: want a list of class names"),
        ({"architectures": "Llama"}, "architectures='Llama': want a list of class names"),
        ({"architectures": [1]}, "architectures=[1]: want a list of class names"),
        ({"architectures": None, "model_type": [1]}, "model_type=[1]: want str"),
        ({"eos_token_id": 320}, "eos_token_id=320: want less than vocab_size=320"),
        ({"eos_token_id": [2, 2**70]}, f"eos_token_id=[2, {2**70}]: want less than vocab_size=320"),
        ({"eos_token_id": -1}, "eos_token_id=-1: want a token id or a list of them"),
        ({"head_dim": 0}, "head_dim=0: want 1 to 4096"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: want 1e-30 to 1"),
        ({"rope_theta": float("inf")}, "rope_theta=inf: want 1 to 1000000000000000"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -3},
            "sliding_window=-3: want 0 to 1073741824",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "low_freq_factor=4.0: want less than high_freq_factor=4.0",
        ),
        ({"eos_token_id": ["x"]}, "eos_token_id=['x']: want a token id or a list of them"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: want 1 to 4096"),
        (
            {"num_key_value_heads": 3, "intermediate_size": 0},
            "intermediate_size=0: want 1 to 1048576; num_key_value_heads=3: want a divisor of "
            "num_attention_heads, 4",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}
            | {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "layer_types linear_attention are not supported",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}
            | {"layer_types": ["full_attention"]},
            "1 layer types for num_layers=3",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, want, tmp_path):
    with pytest.raises(ModelError) as caught:
        read(tmp_path, LLAMA, **change)
    assert str(caught.value) == f"{tmp_path}/config.json: {want}"


NUMBERS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("value", ["0", "-1", "1e400", "-1e400", "NaN", "1" + "0" * 400, '"1"'])
@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_taken_that_cannot_be_computed_with(name, value, tmp_path):
    values = LLAMA | {"rope_scaling": dict(ROPE)}
    (values["rope_scaling"] if name in ROPE else values)[name] = json.loads(value)
    with pytest.raises(ModelError, match=f"^{tmp_path}/config.json: (.*[ :])?{name}=") as caught:
        read(tmp_path, values)
    assert "want" in str(caught.value)


def test_a_bad_end_token_of_the_generation_settings_names_that_file(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 400]}')
    with pytest.raises(ModelError) as caught:
        read(tmp_path, LLAMA)
    assert str(caught.value) == (
        f"{tmp_path}/generation_config.json: eos_token_id=[2, 400]: want less than vocab_size=320"
    )


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{", "not valid JSON: Expecting property name"),
        ("[" * 100_000, "not valid JSON: "),
        ("[1]", "want a JSON object, found list"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_broken_file_is_named(text, want, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        config_from_folder(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: {want}")

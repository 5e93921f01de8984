"""Random bfloat16 weights in a real model's shape, to measure speed with.

    random_folder.py NAME TOKENIZER_FOLDER OUT_FOLDER

NAME is a key of ``SHAPES``. The tokenizer is another model's: every prompt is token ids.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

COMMON: dict[str, Any] = {
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
SHAPES: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "qwen2.5-0.5b": (
        Qwen2ForCausalLM,
        Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            rms_norm_eps=1e-6,
            **COMMON,
        ),
    ),
    "llama-3.2-1b": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
            rms_norm_eps=1e-5,
            **COMMON,
        ),
    ),
}


def main() -> None:
    """Make and save the model."""
    name, tokenizer, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    kind, config = SHAPES[name]
    with torch.device("meta"):
        model = kind(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.fill_(1.0)
            elif key.endswith("bias"):
                weight.zero_()
            else:
                weight.normal_(0.0, 0.02, generator=generator)
    model.tie_weights()
    model.save_pretrained(target)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / file).exists():
            shutil.copy(tokenizer / file, target)


if __name__ == "__main__":
    main()

"""Tiny models of every supported architecture, with random weights and a tokenizer of their own.

:func:`make` writes a Hugging Face folder with transformers, which is also what the tests compare
with. Weights are large enough that the logits differ clearly, and the same for the same name.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)

_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the other dog",
    "in 1969 and 2024 there were 12345 things that nobody had counted before",
    "Größe, naïve café, señor, 你好世界, これはテストです, привет мир",
    "def f(x):\n    return x + 1\n\nfor i in range(10):\n    print(f(i))\n",
]

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama3": (
        "Llama",
        {"rope_parameters": _LLAMA3_ROPE, "head_dim": 64, "num_key_value_heads": 1},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-linear": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
            "head_dim": 32,
            "num_key_value_heads": 4,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2", {"hidden_size": 128, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {
            "hidden_size": 128,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
}
"""Name → family and what differs from the base."""


def make(name: str, root: Path, *, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """The folder of the model called ``name`` under ``root``, made if it is not there.

    Models with ``changes`` or other shards need a ``root`` of their own.
    """
    folder = root / name
    if (folder / "config.json").exists():
        return folder
    family, differs = VARIANTS[name]
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(sum(name.encode()))
    model = model_class(config_class(**_BASE | differs | changes)).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                weight.uniform_(-0.3, 0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Add the tokenizer's files to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def reference(folder: Path) -> transformers.PreTrainedModel:
    """The same model in transformers, float32, plain attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def reference_tokenizer(path: Path) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer that transformers makes of a GGUF file. It takes seconds, so it is kept."""
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    text: str = tokenizer.to_str()
    return text

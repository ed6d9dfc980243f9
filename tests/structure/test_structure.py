"""Tests the structure of the source: sizes of files and functions, names of classes, the import contract, the
packages.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT

PACKAGES = {
    "widepack": ROOT / "widepack",
    "widepack_artifacts": ROOT / "artifacts" / "widepack_artifacts",
    "widepack_bench": ROOT / "bench" / "widepack_bench",
    "widepack_cli": ROOT / "cli" / "widepack_cli",
    "widepack_serve": ROOT / "serve" / "widepack_serve",
}
MOST_FILES = 30
MOST_COLUMNS = 110
PRAGMA = re.compile(r"  # (type: ignore|noqa|fmt:).*$")  # a pragma must stay on its line
MOST_LINES = 600
MOST_LINES_OF_FUNCTION = 80
LONG_FUNCTION = 50
LONG_FUNCTIONS = 0.01  # the part of functions that may be longer
CONTRACT_ROWS = 14


@cache
def modules(package: str) -> dict[Path, ast.Module]:
    folder = PACKAGES[package]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def functions(tree: ast.Module) -> dict[str, int]:
    """Returns the number of lines of each function without its docstring, by name and line."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = node.body[0] if ast.get_docstring(node) is not None else None
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if documented is not None:
                lines -= (documented.end_lineno or documented.lineno) - documented.lineno + 1
            found[f"{node.name}:{node.lineno}"] = lines
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_name_is_defined_twice(package: str) -> None:
    """Names that differ only by a leading underscore are equal."""
    places = defaultdict(list)
    for path, tree in modules(package).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert places
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_and_functions_are_short(package: str) -> None:
    long_modules = {
        str(path.relative_to(ROOT)): lines
        for path in modules(package)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    }
    assert long_modules == {}
    long_functions = {
        f"{path.relative_to(ROOT)} {name}": lines
        for path, tree in modules(package).items()
        for name, lines in functions(tree).items()
        if lines > MOST_LINES_OF_FUNCTION
    }
    assert long_functions == {}


def test_at_most_one_function_in_a_hundred_is_long() -> None:
    lines = [
        n for package in PACKAGES for tree in modules(package).values() for n in functions(tree).values()
    ]
    assert len(lines) > 1000
    assert sum(n > LONG_FUNCTION for n in lines) <= LONG_FUNCTIONS * len(lines)


def test_lines_are_not_too_long() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    paths = [ROOT / name for name in tracked] or [p for package in PACKAGES for p in modules(package)]
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        if path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(PRAGMA.sub("", line)) > MOST_COLUMNS
    ]
    assert long == []


def test_the_import_contract_has_few_layers() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'containers = \["widepack"\].*?layers = \[(.*?)\]', text, re.DOTALL)
    assert found is not None
    rows = re.findall(r'"([^"]+)"', found[1])
    assert 1 < len(rows) <= CONTRACT_ROWS
    rooms = {path.name for path in PACKAGES["widepack"].iterdir() if (path / "__init__.py").is_file()}
    assert {room.strip() for row in rows for room in row.split("|")} == rooms


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_is_described_whole(package: str) -> None:
    """The page of a folder names each of its files, and no other. A folder has at most 30 files."""
    for page in PACKAGES[package].rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(page.read_text(encoding="utf-8"))) or ""
        files = {path.stem for path in page.parent.glob("*.py")} - {"__init__", "__main__"}
        assert [name for name in sorted(files) if not re.search(rf"\b{name}\b", text)] == [], page
        named = set(re.findall(r"^\| `(\w+)\.py` \|", text, re.MULTILINE))
        assert named <= files, page
        assert len(files) < MOST_FILES or page.parent.name == "primitives", page


def test_files_that_pages_for_developers_name_exist() -> None:
    """How-to pages also name files of users."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = {Path(name).name for name in tracked.stdout.split()} or {p.name for p in ROOT.rglob("*.py")}
    pages = [*(ROOT / "docs" / "explanation").glob("*.md"), *(ROOT / "docs" / "contributing").glob("*.md")]
    pages += [*(ROOT / "artifacts").glob("*.md"), *ROOT.glob("*/README.md"), ROOT / "CONTRIBUTING.md"]
    gone = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
        if Path(name).name not in names
    ]
    assert gone == [] and len(pages) > 10


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_and_package_has_a_description(package: str) -> None:
    silent = [
        str(path.relative_to(ROOT)) for path, tree in modules(package).items() if not ast.get_docstring(tree)
    ]
    assert [name for name in silent if not name.endswith("__main__.py")] == []
    for folder in PACKAGES[package].iterdir():
        assert (
            not folder.is_dir()
            or folder.name in ("__pycache__", "schemas")
            or (folder / "__init__.py").is_file()
        )

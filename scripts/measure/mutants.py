"""Draws small changes of the library by a seed, and runs the tests of their rooms: which changes are caught?

usage: python scripts/measure/mutants.py draw -o MUTANTS.json [--seed S] [--count N]
       python scripts/measure/mutants.py run MUTANTS.json --as NAME [--first N] [--workers W]

`draw` writes the changes: a function, a line of it, and the line that takes its place. `run` finds each in
this checkout, by the function's name and the line's text, whichever file they are in now. It applies the
change to a copy of the checkout and runs the tests of the function's room for at most 60 s of CPU time.
Changes whose code is gone are skipped. Each result is written under NAME as soon as it is known, so that
two commits can be compared; a second run goes on where the first one ended. A change that was caught under
another name is tried first with the file of tests that caught it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60  # of CPU time for the tests of one change
LEFT_OUT = shutil.ignore_patterns(".venv*", ".*_cache", "__pycache__", "site")
OPPOSITES = [
    *(("==", "!="), ("<", "<="), (">", ">="), (" in ", " not in "), (" is ", " is not "), (" and ", " or ")),
    *((" + ", " - "), ("True", "False"), ("min(", "max("), ("any(", "all("), ("[0]", "[-1]")),
]
BACK = [(new, old) for old, new in OPPOSITES]
NUMBERS = {" 0": " 1", "(0": "(1", " 1": " 2", "(1": "(2"}
ONE_WAY = {" * ": " + ", " / ": " * ", " // ": " * ", " not ": " ", "continue": "break"}
SWAPPED = {**dict(OPPOSITES), **dict(BACK), **ONE_WAY, **NUMBERS}
STATEMENTS = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.If, ast.While, ast.Assert, ast.Raise)


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields each function of a module with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        name = f"{outer}{getattr(node, 'name', '')}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{name}.")


def code_lines(function: Any, lines: list[str]) -> list[int]:
    """Returns the numbers of a function's lines that begin a simple statement or a condition."""
    found = [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, STATEMENTS) and not isinstance(getattr(node, "value", None), ast.Constant)
    ]
    texts = ('"', "'", "f'", 'f"')
    return sorted({number for number in found if not lines[number - 1].lstrip().startswith(texts)})


def changes(line: str) -> list[str]:
    """Returns the lines that may take a line's place."""
    plain = re.sub(r"\"[^\"]*\"|'[^']*'", lambda text: "\0" * len(text.group()), line)
    found = []
    for old, new in SWAPPED.items():
        for place in re.finditer(re.escape(old), plain):
            found.append(line[: place.start()] + new + line[place.end() :])
    indent = line[: len(line) - len(line.lstrip())]
    if re.match(r"\s*(raise\b|[\w.]+\(|[\w.\[\]]+ [+|&-]?= )", line) and line.rstrip().endswith((")", "]")):
        found.append(f"{indent}pass")
    if condition := re.match(r"(\s*(?:el)?if )([^:]*):$", line):
        found.append(f"{condition[1]}not ({condition[2]}):")
    return found


def compiles(lines: list[str], number: int, new: str) -> bool:
    """Returns whether a file is still Python with one line replaced."""
    try:
        ast.parse("\n".join([*lines[: number - 1], new, *lines[number:]]))
    except SyntaxError:
        return False
    return True


def draw(seed: int, count: int) -> list[dict[str, Any]]:
    """Returns changes: first a function, each with the same chance, then a line, then the change."""
    chance = random.Random(seed)
    sources = {path: path.read_text().splitlines() for path in sorted((ROOT / "widepack").rglob("*.py"))}
    places = [
        (path, name, node)
        for path, lines in sources.items()
        for name, node in functions(ast.parse("\n".join(lines)))
    ]
    chance.shuffle(places)
    found: list[dict[str, Any]] = []
    for path, name, node in places:
        if len(found) == count:
            break
        lines = sources[path]
        options = [
            (number, new)
            for number in code_lines(node, lines)
            for new in changes(lines[number - 1])
            if compiles(lines, number, new)
        ]
        if options:
            number, new = chance.choice(options)
            texts = {"line": lines[number - 1].strip(), "changed": new.strip()}
            found.append({"file": str(path.relative_to(ROOT)), "function": name, **texts})
    return found


def place(mutant: dict[str, Any], root: Path) -> tuple[Path, int] | None:
    """Returns the file and the line of a change in a checkout, or None where its code is gone.

    The file that it was drawn in comes first, then others with a function of this name.
    """
    drawn = root / mutant["file"]
    short = mutant["function"].rpartition(".")[2]
    for path in [drawn, *sorted((root / "widepack").rglob("*.py"))]:
        text = path.read_text() if path.exists() else ""
        if mutant["line"] not in text or f"def {short}(" not in text:
            continue
        lines = text.splitlines()
        for name, node in functions(ast.parse(text)):
            if name.rpartition(".")[2] == short:
                for number in code_lines(node, lines):
                    if lines[number - 1].strip() == mutant["line"]:
                        return path, number
    return None


def outcome(mutant: dict[str, Any], copy: Path, first: list[str]) -> dict[str, Any]:
    """Applies a change to a copy of the checkout, runs the tests of its room, and takes the change back.

    first: files of tests that caught it before.
    """
    found = place(mutant, copy)
    if found is None:
        return {"result": "gone"}
    path, number = found
    text = path.read_text()
    lines = text.splitlines()
    line = lines[number - 1]
    lines[number - 1] = line[: len(line) - len(line.lstrip())] + mutant["changed"]
    path.write_text("\n".join(lines) + "\n")
    try:
        return _tests(copy, path.relative_to(copy).parts[1], first)
    finally:
        path.write_text(text)


def _tests(copy: Path, room: str, first: list[str]) -> dict[str, Any]:
    folders = [str(folder) for folder in [copy / "tests" / room] if folder.is_dir()]
    files = [name for name in first if (copy / name).exists()]
    packages = [copy, *(copy / name for name in ("artifacts", "cli", "bench", "serve"))]
    start = time.perf_counter()
    words = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not extended", "--tb=no", *files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *(folders or ["tests/structure"])],
        cwd=copy,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, packages))},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS)),
    )
    failed = re.search(r"^(?:FAILED|ERROR) (tests/[\w/]+\.py)(\S*)", done.stdout, re.MULTILINE)
    # 1 is a failed test, 2 and 4 are errors while tests are collected. Below 0 the time ended.
    caught = done.returncode in (1, 2, 4)
    where = {"file": failed[1], "test": failed[1] + failed[2]} if failed else {}
    seconds = round(time.perf_counter() - start)
    return {"result": "caught" if caught else "lived", "seconds": seconds, **where}


def run(path: Path, name: str, first: int, workers: int) -> None:
    """Runs the first changes whose code is there, and writes how each ended."""
    document = json.loads(path.read_text())
    mutants = document["mutants"]
    chosen = [number for number, mutant in enumerate(mutants) if place(mutant, ROOT)][:first]
    for number in range(len(mutants)):
        if number not in chosen and (not chosen or number < chosen[-1]):
            mutants[number].setdefault("results", {})[name] = {"result": "gone"}
    waiting = [number for number in chosen if name not in mutants[number].get("results", {})]
    with tempfile.TemporaryDirectory() as folder:

        def work(part: int) -> None:
            copy = Path(folder) / str(part)
            shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
            for number in waiting[part::workers]:
                mutant = mutants[number]
                results = mutant.setdefault("results", {})
                before = [row["file"] for row in results.values() if "file" in row]
                results[name] = outcome(mutant, copy, before)
                print(number, mutant["function"], results[name], file=sys.stderr, flush=True)
                path.write_text(json.dumps(document, indent=1) + "\n")

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    drawing, running = parts.add_parser("draw"), parts.add_parser("run")
    drawing.add_argument("-o", "--out", type=Path, required=True)
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--count", type=int, default=400)
    running.add_argument("mutants", type=Path)
    running.add_argument("--as", dest="name", required=True, help="the name of this commit's results")
    words = "how many changes, of those whose code is there"
    running.add_argument("--first", type=int, default=200, help=words)
    running.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if options.part == "draw":
        document = {"seed": options.seed, "mutants": draw(options.seed, options.count)}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    else:
        run(options.mutants, options.name, options.first, options.workers)


if __name__ == "__main__":
    main()

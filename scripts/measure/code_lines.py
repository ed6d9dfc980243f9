"""Counts the lines that hold code in committed Python files: no blank, comment or docstring lines.

python scripts/measure/code_lines.py             # by package, and by room of the library
python scripts/measure/code_lines.py scripts/ tests/bench
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def code_lines(text: str) -> int:
    """Returns how many lines of a source text hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
        value = first.value if isinstance(first, ast.Expr) else None
        if first and isinstance(value, ast.Constant) and isinstance(value.value, str):
            held.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = text.splitlines()
    return sum(1 for number in held if lines[number - 1].strip())


def main(places: Sequence[str]) -> None:
    """Prints the code lines and all lines of each package, and the code lines of each room of the library."""
    listed = subprocess.run(
        ["git", "ls-files", *places], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    code: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    for name in (name for name in listed.split() if name.endswith(".py") and (ROOT / name).exists()):
        text, parts = (ROOT / name).read_text(encoding="utf-8"), Path(name).parts
        count = code_lines(text)
        code[parts[0]] += count
        whole[parts[0]] += text.count("\n")
        rooms["/".join(parts[:2])] += count if parts[0] == "widepack" else 0
    for name, count in code.most_common():
        print(f"{name:<12} {count:>7,} of {whole[name]:>7,} lines")
    print(f"{'all':<12} {code.total():>7,} of {whole.total():>7,} lines")
    for name, count in rooms.most_common():
        if count:
            print(f"  {name:<24} {count:>6,}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Names the ONNX graphs of an artifact: files for ONNX Runtime, which other readers ignore.

A graph is one member's, without weights. Its file is `programs/onnx.<digest>-<hash>.onnx`, with the first 32
hex digits of the digest of the program that it was made from.
"""

from __future__ import annotations

from collections.abc import Iterable

SUFFIX = "onnx"


def graph_stem(content: str) -> str:
    """The name of a graph's file without its hash. content: the digest of the program."""
    return f"programs/onnx.{content[:32]}"


def graph_file(files: Iterable[str], content: str) -> str:
    """The file of a program's graph in an artifact's list of files; empty if it has none."""
    begin = f"{graph_stem(content)}-"
    return next((n for n in sorted(files) if n.startswith(begin) and n.endswith(f".{SUFFIX}")), "")

"""Checks the arguments of a node that are known before any value is."""

from __future__ import annotations

import re

from widepack_artifacts.program import Node, Ref, Tag, refs

from ..errors import ArtifactError
from ..ir import ops
from ..ir.encoding import iter_arguments

_TEXT = re.compile(r"[A-Za-z0-9_ .,:>-]{0,1000}")
"""Texts of ops of torch: modes, equations of einsum. A compiler writes them into source code."""


def check_arguments(node: Node) -> None:
    """Checks the keywords of a node, and that a literal determines the type of its result.

    torch accepts any number as a dtype, and reads outside its tables. A dtype that a value determines could
    be a number at a call although it was a dtype at the load.

    Raises: ArtifactError.
    """
    unknown = set(node.kwargs) - {a for a, _, _ in ops.arguments(node.op)}
    if unknown:
        raise ArtifactError(
            f"program: node {node.name} passes the keyword {sorted(unknown)[0]!r} to {node.op}, which "
            "does not have it"
        )
    if node.op == "operator.getitem":
        _check_part(node)
    if node.op in ops.PYTHON:
        return
    for value in iter_arguments((node.args, node.kwargs)):
        text = value.name if isinstance(value, Tag) else value
        if isinstance(text, str) and not _TEXT.fullmatch(text):
            raise ArtifactError(
                f"program: node {node.name} ({node.op}) has the text {text!r:.60} as an argument; only "
                "letters, digits, spaces and _ . , : - > are allowed"
            )
    given = ops.bind(node.op, node.args, node.kwargs)
    for name in ops.enumerations(node.op) | ops.devices(node.op):
        value = given.get(name)
        if isinstance(value, Ref):
            raise ArtifactError(
                f"program: node {node.name} ({node.op}) has a value as {name}; only a literal is allowed"
            )
        if value is not None and not isinstance(value, Tag):
            raise ArtifactError(f"program: node {node.name} ({node.op}) has {value!r:.60} as {name}")


def _check_part(node: Node) -> None:
    """Checks that a part is one of a value, at a literal place: another part could have another type."""
    if len(node.args) != 2 or not isinstance(node.args[0], Ref):
        raise ArtifactError(f"program: node {node.name} ({node.op}) does not read a part of one value")
    if any(True for _ in refs(node.args[1])):
        raise ArtifactError(
            f"program: node {node.name} ({node.op}) has a value as index; only a literal is allowed"
        )

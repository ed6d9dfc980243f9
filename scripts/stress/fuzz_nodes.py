"""Adds random nodes to the programs of an artifact."""

from __future__ import annotations

import random
from typing import Any

from fuzz_json import INTS


def add_node(draw: random.Random, program: Any) -> None:
    """Adds a node of a random op of the allow-list at a random place in the program. Its arguments have the
    types of the schema and any size.
    """
    from widepack.ir import ops
    from widepack_artifacts.opset import OPS

    if not isinstance(program.get("nodes"), list):
        return
    op = draw.choice(_ops(tuple(sorted(OPS))))
    at = draw.randrange(len(program["nodes"]) + 1)
    names = [
        s[0] for key in ("weights", "inputs") for s in program.get(key) or [] if isinstance(s, list) and s
    ]
    names += [n.get("name", "x") for n in program["nodes"][:at] if isinstance(n, dict)]
    names = names[-12:] + names[:4]
    args = (
        [_argument(draw, type_, names) for _, type_, _ in ops.arguments(op)]
        if op.startswith(("aten", "widepack"))
        else [
            draw.choice([{"ref": draw.choice(names)}, draw.choice(INTS)])
            for _ in range(draw.choice([1, 2, 2]))
        ]
    )
    given = (
        len(args)
        if draw.random() < 0.3
        else max(1, sum(default is None for _, _, default in ops.arguments(op)) or 1)
    )
    node: dict[str, Any] = {"name": f"added_{draw.randrange(10**6)}", "op": op, "args": args[:given]}
    extra = {
        name: _argument(draw, type_, names)
        for name, type_, _ in ops.arguments(op)[given:]
        if draw.random() < 0.2
    }
    if extra:
        node["kwargs"] = extra
    if draw.random() < 0.1 and program["nodes"]:
        body: dict[str, Any] = {
            "format": "widepack.program/1",
            "members": 0,
            "weights": [],
            "inputs": [["a", "a", draw.choice(["shared", "stacked", "ragged"]), ""]],
            "nodes": [{**node, "args": [{"ref": "a"}, *args[1:given]]}],
            "outputs": [[{"ref": node["name"]}, draw.choice(["stacked", "ragged"])]],
        }
        node = (
            {
                "name": f"{node['name']}_loop",
                "op": "loop",
                "args": [{"ref": draw.choice(names)}],
                "body": body,
            }
            if names
            else node
        )
    program["nodes"].insert(at, node)
    later = [n for n in program["nodes"][at + 1 :] if isinstance(n, dict) and n.get("args")]
    if later and draw.random() < 0.5:  # a later node reads the new node
        reader = draw.choice(later)["args"]
        reader[draw.randrange(len(reader))] = {"ref": node["name"]}


_KNOWN: dict[int, list[str]] = {}


def _ops(names: tuple[str, ...]) -> list[str]:
    """Returns every op of the list that this version of torch has."""
    from widepack.errors import ArtifactError
    from widepack.ir import ops

    if 0 not in _KNOWN:
        _KNOWN[0] = []
        for name in names:
            try:
                ops.resolve(name)
            except ArtifactError:
                continue
            _KNOWN[0].append(name)
    return _KNOWN[0]


def _argument(draw: random.Random, type_: str, names: list[str]) -> Any:
    """Returns an argument of a type of the schema."""
    small = draw.choice([0, 1, 1, 2, 3, -1, -2, 5]) if draw.random() < 0.7 else draw.choice(INTS)
    if type_.startswith("Optional") or type_.endswith("?"):
        if draw.random() < 0.5:
            return None
        type_ = type_.removeprefix("Optional[").removesuffix("]").removesuffix("?")
    if type_.startswith("List") or type_.endswith("[]"):
        inner = type_.removeprefix("List[").removesuffix("]").removesuffix("[")
        return [_argument(draw, inner, names) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4]))]
    if "Tensor" in type_:
        return {"ref": draw.choice(names)} if names else 1
    if type_ in ("int", "SymInt"):
        return small
    if type_ == "float":
        return draw.choice([0.0, 1.0, -1.0, 0.5, 1e300, {"float": "nan"}, {"float": "inf"}])
    if type_ == "bool":
        return draw.random() < 0.5
    if type_ == "str":
        return {
            "str": draw.choice(
                [
                    "",
                    "none",
                    "mean",
                    "ij,jk->ik",
                    "...ij->...",
                    "sum",
                    "fro",
                    "floor",
                    "constant",
                    "reflect",
                    "relu",
                    "tanh",
                    "a,b,c,d->abcd",
                ]
            )
        }
    if type_ in ("Scalar", "number"):
        return draw.choice([small, 0.5, {"float": "nan"}, True, {"complex": [1.0, 2.0]}])
    if type_ in ("ScalarType", "dtype"):
        return {
            "dtype": draw.choice(
                [
                    "float32",
                    "float64",
                    "int64",
                    "bool",
                    "uint8",
                    "float16",
                    "bfloat16",
                    "complex64",
                    "complex128",
                    "quint8",
                    "float8_e4m3fn",
                    "bits8",
                ]
            )
        }
    if type_ == "Device":
        return {"device": "self"}
    if type_ == "Layout":
        return {"layout": "strided"}
    if type_ == "MemoryFormat":
        return {
            "memory_format": draw.choice(
                ["contiguous_format", "channels_last", "preserve_format", "channels_last_3d"]
            )
        }
    return small

"""Changes artifacts at random: damages files, or forges documents and tensors with correct hashes."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
from functools import cache
from typing import Any

from widepack.errors import ArtifactError
from widepack.ir import ops
from widepack_artifacts.opset import OPS

Files = dict[str, bytes]
INTS = [
    0, 1, -1, 2, 3, 7, 64, 255, 65536, 2**20, 2**30, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1,
    -(2**31), -(2**63),
]  # fmt: skip
TEXTS = [
    "", "x", "../../etc/passwd", "os.system", "__import__('os').system('touch canary')", "\x1b[2J", "forward",
    "float32[B,3]", "é" * 3, "a" * 2000, "nan", "cpu", "aot", "__class__",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 1.5, -0.0, 1e308, [], {}, [[]], [1, 2], {"ref": "x"}, {"str": "x"}, {"float": "nan"},
]  # fmt: skip
WORDS = [
    "", "none", "mean", "ij,jk->ik", "...ij->...", "sum", "fro", "floor", "constant", "reflect", "relu",
    "tanh", "a,b,c,d->abcd",
]  # fmt: skip
DTYPES = [
    "float32", "float64", "int64", "bool", "uint8", "float16", "bfloat16", "complex64", "complex128",
    "quint8", "float8_e4m3fn", "bits8",
]  # fmt: skip
FORMATS = ["contiguous_format", "channels_last", "preserve_format", "channels_last_3d"]
DAMAGES = ["bits", "cut", "splice", "double", "gone", "zeros", "empty"]
FORGERIES = ["manifest"] * 2 + ["program"] + ["node"] * 5 + ["argument"] * 2 + ["tensors", "records", "bare"]

# ---------------------------------------------------------------- documents


def paths(value: Any, limit: int = 4000) -> list[tuple[Any, Any]]:
    """Returns every place in a document, as (container, key)."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < limit:
        part = waiting.pop()
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            found.append((part, key))
            if isinstance(part[key], (dict, list)):
                waiting.append(part[key])
    return found


def junk(draw: random.Random) -> Any:
    """Returns a value that is wrong in most places."""
    deep: Any = 1
    for _ in range(draw.choice([3, 40, 150])):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    return draw.choice([draw.choice(INTS), draw.choice(TEXTS), *copy.deepcopy(VALUES), deep, ["a"] * 300])


def mutate_json(draw: random.Random, document: Any, donors: list[Any]) -> None:
    """Changes a document once, in place."""
    places = paths(document)
    if not places:
        return
    part, key = draw.choice(places)
    how = draw.randrange(8)
    if how <= 2:
        part[key] = junk(draw)
    elif how == 3 and isinstance(part[key], int):
        part[key] = draw.choice([part[key] + 1, -part[key], part[key] * 2**31, draw.choice(INTS)])
    elif how == 4:
        del part[key]
    elif how == 5:
        part[key] = copy.deepcopy(_at(draw.choice(paths(draw.choice(donors)) or places)))
    elif isinstance(part, list) and len(part) > 1:
        other = draw.randrange(len(part))
        if how == 6:
            part[key], part[other] = part[other], part[key]
        else:
            part.insert(other, copy.deepcopy(part[key]))
    elif isinstance(part, dict):
        part[draw.choice(TEXTS)] = part.pop(key)


def _at(place: tuple[Any, Any]) -> Any:
    return place[0][place[1]]


def add_node(draw: random.Random, program: Any) -> None:
    """Adds a node of a random op of the allow-list at a random place in the program. Its arguments have the
    types of the schema and any size.
    """
    if not isinstance(program.get("nodes"), list):
        return
    op = draw.choice(known_ops())
    at = draw.randrange(len(program["nodes"]) + 1)
    names = [
        s[0] for key in ("weights", "inputs") for s in program.get(key) or [] if isinstance(s, list) and s
    ]
    names += [n.get("name", "x") for n in program["nodes"][:at] if isinstance(n, dict)]
    names = names[-12:] + names[:4]
    if op.startswith(("aten", "widepack")):
        args = [_argument(draw, type_, names) for _, type_, _ in ops.arguments(op)]
    else:
        choices = range(draw.choice([1, 2, 2]))
        args = [draw.choice([{"ref": draw.choice(names)}, draw.choice(INTS)]) for _ in choices]
    required = sum(default is None for _, _, default in ops.arguments(op))
    given = len(args) if draw.random() < 0.3 else max(1, required)
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
        if names:
            first = [{"ref": draw.choice(names)}]
            node = {"name": f"{node['name']}_loop", "op": "loop", "args": first, "body": body}
    program["nodes"].insert(at, node)
    later = [n for n in program["nodes"][at + 1 :] if isinstance(n, dict) and n.get("args")]
    if later and draw.random() < 0.5:  # a later node reads the new node
        reader = draw.choice(later)["args"]
        reader[draw.randrange(len(reader))] = {"ref": node["name"]}


@cache
def known_ops() -> list[str]:
    """Returns every op of the allow-list that this version of torch has."""
    found = []
    for name in sorted(OPS):
        with contextlib.suppress(ArtifactError):
            ops.resolve(name)
            found.append(name)
    return found


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
        return {"str": draw.choice(WORDS)}
    if type_ in ("Scalar", "number"):
        return draw.choice([small, 0.5, {"float": "nan"}, True, {"complex": [1.0, 2.0]}])
    if type_ in ("ScalarType", "dtype"):
        return {"dtype": draw.choice(DTYPES)}
    if type_ == "Device":
        return {"device": "self"}
    if type_ == "Layout":
        return {"layout": "strided"}
    if type_ == "MemoryFormat":
        return {"memory_format": draw.choice(FORMATS)}
    return small


# ---------------------------------------------------------------- files


def damaged(draw: random.Random, files: Files, others: list[Files]) -> tuple[str, Files]:
    """Damages one file. Returns the kind of damage and the files."""
    names = sorted(files)
    name = "manifest.json" if draw.random() < 0.4 else draw.choice(names)
    data = bytearray(files[name])
    how = draw.choice([*DAMAGES[:4], "json" if name.endswith(".json") else "bits", *DAMAGES[4:]])
    if how == "bits":
        for _ in range(draw.choice([1, 1, 1, 2, 8])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del data[draw.randrange(len(data)) :]
    elif how == "splice":
        other = draw.choice(others)
        part = other[draw.choice(sorted(other))]
        a, b = sorted(draw.randrange(len(part) + 1) for _ in range(2))
        at = draw.randrange(len(data))
        data[at : at + draw.choice([0, b - a])] = part[a:b]
    elif how == "double":
        a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        data[b:b] = data[a:b]
    elif how == "json":
        found = json.loads(data)
        mutate_json(draw, found, [found])
        text = json.dumps(found, separators=(",", ":"), indent=draw.choice([None, None, 1]))
        data = bytearray(text.encode("utf-8", "surrogatepass"))
    elif how == "zeros":
        a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        data[a:b] = bytes(b - a)
    elif how == "empty":
        data = bytearray()
    changed = {**files, name: bytes(data)}
    if how == "gone":
        del changed[name]
    return f"{how} {name.partition('-')[0]}", changed


def rewritten(draw: random.Random, files: Files, others: list[Files]) -> tuple[str, Files]:
    """Changes manifest, programs or tensors according to their structure, and corrects hashes, names and
    digest.
    """
    documents = {n: json.loads(d) for n, d in files.items() if n.endswith(".json")}
    other = draw.choice(others)
    donors = [*documents.values(), *(json.loads(d) for n, d in other.items() if n.endswith(".json"))]
    programs = [n for n in documents if n.startswith("programs/")]
    binary = dict(files)
    changes = []
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        how = draw.choice(FORGERIES)
        changes.append(how)
        if how == "manifest":
            part = documents["manifest.json"]
            key = draw.choice([k for k in part if k not in ("files", "digest", "format")])
            inside = isinstance(part[key], (dict, list)) and part[key]
            mutate_json(draw, part[key] if inside else part, donors)
        elif how == "records":
            part = documents["manifest.json"]
            for entry in part["entries"].values() if isinstance(part["entries"], dict) else ():
                found = entry.get("wide") if isinstance(entry, dict) else None
                for wide in found if isinstance(found, list) else ():
                    if isinstance(wide, dict) and isinstance(wide.get("plan"), dict) and draw.random() < 0.5:
                        mutate_json(draw, wide["plan"], donors)
            mutate_json(draw, part["verification"] if part["verification"] else part, donors)
        elif how == "bare":  # without wide programs, the load lowers the member program
            for entry in documents["manifest.json"]["entries"].values():
                entry["wide"] = []
        elif how == "program":
            mutate_json(draw, documents[draw.choice(programs)], donors)
        elif how == "argument":
            program = documents[draw.choice(programs)]
            nodes = [n for n in program.get("nodes") or [] if isinstance(n, dict) and n.get("args")]
            if nodes:
                mutate_json(draw, draw.choice(nodes)["args"], donors)
        elif how == "node":
            add_node(draw, documents[draw.choice(programs)])
        else:
            name = draw.choice([n for n in files if n.endswith(".safetensors")])
            binary[name] = tensors_changed(draw, binary[name])
    return "+".join(sorted(set(changes))), sealed(documents, binary)


def tensors_changed(draw: random.Random, data: bytes) -> bytes:
    """Returns a safetensors file with another header or other numbers."""
    size = int.from_bytes(data[:8], "little")
    if draw.random() < 0.5:
        changed = bytearray(data)
        for _ in range(draw.choice([1, 16])):
            if len(data) > 8 + size:
                changed[draw.randrange(8 + size, len(data))] = draw.randrange(256)
        return bytes(changed)
    header = json.loads(data[8 : 8 + size])
    mutate_json(draw, header, [header])
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    length = len(text) if draw.random() < 0.9 else draw.choice(INTS) % 2**63
    return length.to_bytes(8, "little") + text + data[8 + size :]


def sealed(documents: dict[str, Any], binary: Files) -> Files:
    """Returns the files with correct hashes, names and digest."""
    manifest = documents["manifest.json"]
    result: Files = {}
    renamed: dict[str, str] = {}
    table: dict[str, Any] = {}
    for name, old in binary.items():
        if name == "manifest.json":
            continue
        data = _encoded(documents[name]) if name in documents else old
        stem, suffix = name.rsplit("-", 1)[0], name.rsplit(".", 1)[1]
        sha256 = hashlib.sha256(data).hexdigest()
        renamed[name] = f"{stem}-{sha256[:16]}.{suffix}"
        result[renamed[name]] = data
        table[renamed[name]] = {"bytes": len(data), "sha256": sha256}

    def with_new_names(value: Any) -> Any:
        if isinstance(value, str):
            return renamed.get(value, value)
        if isinstance(value, list):
            return [with_new_names(v) for v in value]
        return {k: with_new_names(v) for k, v in value.items()} if isinstance(value, dict) else value

    body = {k: with_new_names(v) for k, v in manifest.items() if k not in ("digest", "files")}
    body["files"] = table
    body["digest"] = (
        "sha256:" + hashlib.sha256(_encoded(body, sort_keys=True, ensure_ascii=False)).hexdigest()
    )
    result["manifest.json"] = _encoded(body, sort_keys=True, ensure_ascii=False)
    return result


def _encoded(value: Any, **form: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), **form).encode("utf-8", "surrogatepass")

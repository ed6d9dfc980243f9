"""Loads mutated artifacts, one after the other, in a monitored process: damaged files, and files of an
attacker.

    python scripts/stress/fuzz_artifacts.py --hashes on --cases 100000 -o fuzz.json      files are damaged:
    bits, ends, parts, JSON python scripts/stress/fuzz_artifacts.py --fixed-up --seconds 600 -o fuzz.json
    manifest and programs are rewritten; hashes, names and digest are right again

Damage must end in an ArtifactError of one sentence, or in an artifact that answers bit for bit as before. A
rewritten artifact may load. Neither may end in another exception, a crash, over 10 s of a core, over 1 GB, a
file opened outside the folder, or an import that the load of an honest artifact does not do.

`-o` adds the run to the file's list of runs. A case is made from the seed, the mode and its number alone:
`--case 123 --seed 0` shows one again.
"""

from __future__ import annotations

import argparse
import base64
import copy
import hashlib
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 10.0
BYTES = 1_000_000_000
BATCH = 10_000
"""Cases that one worker does before a fresh one takes its place."""
FINE = ("refused", "same", "loaded")
INTS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    255,
    65536,
    2**20,
    2**30,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53,
    2**62,
    2**63 - 1,
    -(2**31),
    -(2**63),
]
TEXTS = [
    "",
    "x",
    "../../etc/passwd",
    "os.system",
    "__import__('os').system('touch canary')",
    "\x1b[2J",
    "forward",
    "float32[B,3]",
    "é" * 3,
    "a" * 2000,
    "nan",
    "cpu",
    "aot",
    "__class__",
]

# ---------------------------------------------------------------- what is mutated


def corpus(folder: Path) -> None:
    """Small artifacts of several forms."""
    import torch
    from torch import nn

    import widepack

    class Mlp(nn.Sequential):
        def __init__(self, out: int = 3) -> None:
            super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, out))

    class Conv(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.Conv2d(3, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(64, 5),
            )

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer, self.head = (
                nn.Embedding(11, 8),
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
                nn.Linear(8, 4),
            )

        def forward(self, ids: Any) -> Any:
            return {"logits": self.head(self.layer(self.table(ids)).mean(1)), "seen": (ids > 3).sum(1)}

    class Counting(nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            self.total = self.total + x.sum(0)
            return self.layer(x) + self.total

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.GRU(6, 3, batch_first=True)

        def encode(self, x: Any) -> Any:
            return self.up(x).relu()

        def forward(self, x: Any) -> Any:
            return self.down(self.encode(x))[0]

    def headed(state_dict: Any = None) -> nn.Module:
        return Mlp(3 if state_dict is None else len(state_dict["3.bias"]))

    made: list[tuple[str, Any, list[Callable[[], nn.Module]], list[str], dict[str, Any]]] = [
        ("mlp", Mlp, [Mlp] * 3, ["input=float32[B,6]"], {}),
        ("mlp-pt2", Mlp, [Mlp] * 2, ["input=float32[B,6]"], {"pt2": True}),
        ("conv", Conv, [Conv] * 3, ["input=float32[B,3,8,8]"], {}),
        ("loop", Conv, [Conv] * 2, ["input=float32[B,3,8,8]"], {"strategy": "loop"}),
        ("tokens", Tokens, [Tokens] * 2, ["ids=int64[B,T]:0..10"], {}),
        ("ragged", headed, [lambda: Mlp(3), lambda: Mlp(5)], ["input=float32[B,6]"], {}),
        ("state", Counting, [Counting] * 2, ["x=float32[B,4]"], {"state": ["total"]}),
        (
            "entries",
            Two,
            [Two] * 2,
            ["forward:x=float32[B,3,4]", "encode:x=float32[B,4]"],
            {"entries": ["forward", "encode"]},
        ),
    ]
    for name, model, kinds, inputs, more in made:
        paths = []
        for i, kind in enumerate(kinds):
            torch.manual_seed(i)
            paths.append(str(folder / f"{name}-{i}.pt"))
            torch.save(kind().state_dict(), paths[-1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            widepack.build(
                paths,
                folder / f"{name}.wide",
                model=model,
                inputs=inputs,
                **{"pt2": False, "targets": ("cpu",), **more},
            )


Files = dict[str, bytes]


def read(artifact: Path) -> Files:
    return {
        p.relative_to(artifact).as_posix(): p.read_bytes() for p in sorted(artifact.rglob("*")) if p.is_file()
    }


def write(folder: Path, files: Files, old: Files) -> None:
    """Make the folder hold these files, where it holds the old ones. Files are replaced and never written
    into: one may be mapped.
    """
    for name in old.keys() - files.keys():
        (folder / name).unlink()
    for name, data in files.items():
        if old.get(name) != data:
            place = folder / name
            place.parent.mkdir(exist_ok=True)
            place.unlink(missing_ok=True)
            place.write_bytes(data)


# ---------------------------------------------------------------- damage


def damaged(draw: random.Random, files: Files, others: list[Files]) -> tuple[str, Files]:
    """One file damaged. Gives a word for how."""
    names = sorted(files)
    name = "manifest.json" if draw.random() < 0.4 else draw.choice(names)
    data = bytearray(files[name])
    how = draw.choice(
        [
            "bits",
            "cut",
            "splice",
            "double",
            "json" if name.endswith(".json") else "bits",
            "gone",
            "zeros",
            "empty",
        ]
    )
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


def paths(value: Any, limit: int = 4000) -> list[tuple[Any, Any]]:
    """Every place in a document, as (container, key)."""
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
    """A value that has no business where it comes to stand."""
    deep: Any = 1
    for _ in range(draw.choice([3, 40, 150])):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    return draw.choice(
        [
            draw.choice(INTS),
            draw.choice(TEXTS),
            None,
            True,
            False,
            1.5,
            -0.0,
            1e308,
            [],
            {},
            [[]],
            [1, 2],
            {"ref": "x"},
            {"str": "x"},
            {"float": "nan"},
            deep,
            ["a"] * 300,
        ]
    )


def mutate_json(draw: random.Random, document: Any, donors: list[Any]) -> None:
    """One change of a document, in place."""
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


# ---------------------------------------------------------------- rewritten, and put right again


def rewritten(draw: random.Random, files: Files, others: list[Files]) -> tuple[str, Files]:
    """Manifest, programs or tensors changed with sense for their structure; hashes, names and digest put
    right.
    """
    documents = {n: json.loads(d) for n, d in files.items() if n.endswith(".json")}
    other = draw.choice(others)
    donors = [*documents.values(), *(json.loads(d) for n, d in other.items() if n.endswith(".json"))]
    programs = [n for n in documents if n.startswith("programs/")]
    binary = dict(files)
    hows = []
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        how = draw.choice(
            [
                "manifest",
                "manifest",
                "program",
                "node",
                "node",
                "node",
                "node",
                "node",
                "argument",
                "argument",
                "tensors",
                "records",
                "bare",
            ]
        )
        hows.append(how)
        if how == "manifest":
            part = documents["manifest.json"]
            key = draw.choice([k for k in part if k not in ("files", "digest", "format")])
            mutate_json(
                draw, part[key] if isinstance(part[key], (dict, list)) and part[key] else part, donors
            )
        elif how == "records":
            part = documents["manifest.json"]
            for entry in part["entries"].values() if isinstance(part["entries"], dict) else ():
                for wide in (
                    entry.get("wide") or []
                    if isinstance(entry, dict) and isinstance(entry.get("wide"), list)
                    else []
                ):
                    if isinstance(wide, dict) and isinstance(wide.get("plan"), dict) and draw.random() < 0.5:
                        mutate_json(draw, wide["plan"], donors)
            mutate_json(draw, part["verification"] if part["verification"] else part, donors)
        elif how == "bare":  # no wide programs: the member's is lowered
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
    return "+".join(sorted(set(hows))), sealed(documents, binary)


def add_node(draw: random.Random, program: Any) -> None:
    """A node of some op of the list with arguments of the types of its schema, and of any size, somewhere in
    the program.
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
    if later and draw.random() < 0.5:  # and something reads it
        reader = draw.choice(later)["args"]
        reader[draw.randrange(len(reader))] = {"ref": node["name"]}


_KNOWN: dict[int, list[str]] = {}


def _ops(names: tuple[str, ...]) -> list[str]:
    """Every op of the list that this torch has."""
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
    """One argument of a schema's type."""
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


def tensors_changed(draw: random.Random, data: bytes) -> bytes:
    """A safetensors file with another header, or other numbers."""
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
    """The files with right hashes, names and digest."""
    manifest = documents["manifest.json"]
    made: Files = {}
    renamed: dict[str, str] = {}
    table: dict[str, Any] = {}
    for name, old in binary.items():
        if name == "manifest.json":
            continue
        data = (
            json.dumps(documents[name], separators=(",", ":")).encode("utf-8", "surrogatepass")
            if name in documents
            else old
        )
        stem, suffix = name.rsplit("-", 1)[0], name.rsplit(".", 1)[1]
        sha256 = hashlib.sha256(data).hexdigest()
        renamed[name] = f"{stem}-{sha256[:16]}.{suffix}"
        made[renamed[name]] = data
        table[renamed[name]] = {"bytes": len(data), "sha256": sha256}

    def to(value: Any) -> Any:
        if isinstance(value, str):
            return renamed.get(value, value)
        if isinstance(value, list):
            return [to(v) for v in value]
        return {k: to(v) for k, v in value.items()} if isinstance(value, dict) else value

    body = {k: to(v) for k, v in manifest.items() if k not in ("digest", "files")}
    body["files"] = table
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    body["digest"] = "sha256:" + hashlib.sha256(text).hexdigest()
    made["manifest.json"] = json.dumps(
        body, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode("utf-8", "surrogatepass")
    return made


# ---------------------------------------------------------------- the worker


class Audit:
    """What a load opens and imports, as Python tells of it."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self.seen: list[str] = []
        inside = [
            str(folder),
            os.environ["XDG_CACHE_HOME"],
            sys.prefix,
            sys.base_prefix,
            os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
            "/proc/",
            "/sys/",
            "/dev/",
        ]
        inside += [p for p in sys.path if p]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if not self.on:
                return
            if event == "open" and isinstance(args[0], (str, bytes)):
                path = os.path.abspath(os.fsdecode(args[0]))
                if not any(path.startswith(p) for p in inside):
                    self.seen.append(f"open {path}")
            elif event in (
                "os.system",
                "os.exec",
                "os.posix_spawn",
                "subprocess.Popen",
                "socket.connect",
                "ctypes.dlopen",
                "pickle.find_class",
                "os.fork",
            ):
                self.seen.append(f"{event} {args!r}"[:200])
            elif event == "import" and str(args[0]).partition(".")[0] not in sys.stdlib_module_names | {
                m.partition(".")[0] for m in sys.modules
            }:
                self.seen.append(f"import {args[0]}")

        sys.addaudithook(hook)


def answers(artifact: Path, **how: Any) -> dict[str, Any]:
    """Loads, and calls every entry with fixed inputs of the example's sizes."""
    import torch

    import widepack
    from widepack.ir.tensor_type import parse_slot

    ens = widepack.load(artifact, **how)
    found: dict[str, Any] = {}
    for name, entry in ens.manifest.entries.items():
        torch.manual_seed(0)
        carried = {s.input for s in entry.state}
        inputs = []
        for k, leaf in enumerate(entry.inputs):
            type_ = parse_slot(leaf.type)
            shape = [d if isinstance(d, int) else d.factor * 2 for d in type_.dims]
            if k not in carried:
                inputs.append(torch.randint(0, 9, shape) if type_.dtype == "int64" else torch.randn(shape))
        found[name] = ens.entry(name)(*inputs, **({"state": ens.entry(name).state()} if carried else {}))
    return found


def bits(value: Any) -> str:
    """A digest of a result's numbers."""
    import torch
    import torch.utils._pytree as pytree

    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(value):
        digest.update(
            str(leaf).encode()
            if not isinstance(leaf, torch.Tensor)
            else f"{leaf.dtype}{list(leaf.shape)}".encode() + leaf.contiguous().numpy().tobytes()
        )
    return digest.hexdigest()


def work(mode: str, seed: int, folder: Path, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """One case after the other: a row of what came of each."""
    import widepack
    from widepack.errors import ArtifactError

    warnings.simplefilter("ignore")
    names = sorted(p.name for p in folder.glob("*.wide"))
    base = {n: read(folder / n) for n in names}
    right = {n: bits(answers(folder / n)) for n in names}
    answers(folder / names[0], strategies="auto")  # what lowering imports is imported now
    place = folder / f"at-work-{os.getpid()}"
    audit = Audit(place)
    at: Files = {}
    place.mkdir()
    for number in numbers:
        draw = random.Random(f"{mode} {seed} {number}")
        name = draw.choice(names)
        others = [base[n] for n in names]
        try:
            how, files = (
                damaged(draw, base[name], others) if mode == "hashes" else rewritten(draw, base[name], others)
            )
        except (TypeError, KeyError, AttributeError, IndexError, ValueError, RecursionError):
            yield {"case": number, "outcome": "none", "how": "no mutation"}
            continue
        write(place, files, at)
        at = files
        row: dict[str, Any] = {"case": number, "artifact": name, "how": how}
        audit.seen.clear()
        start = time.process_time()
        audit.on = True
        try:
            if mode == "hashes":
                row["outcome"] = "same" if bits(answers(place, verify="hashes")) == right[name] else "wrong"
            else:
                widepack.load(place).warmup(("shared",) if "bare" in how else ("shared", "each"))
                row["outcome"] = "loaded"
        except ArtifactError as e:
            text = str(e)
            fine = (
                bool(text.strip())
                and not any(ord(c) < 32 and c not in "\n\t" for c in text)
                and len(text) < 100_000
            )
            row.update(outcome="refused" if fine else "no sentence", text=text[:300])
        except Exception as e:  # noqa: BLE001  what is looked for
            row.update(
                outcome="exception",
                text=f"{type(e).__name__}: {str(e)[:300]}",
                trace=traceback.format_exc()[-1500:],
            )
        finally:
            audit.on = False
        row["seconds"] = round(time.process_time() - start, 3)  # its own: other processes may have the cores
        row["bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if row["outcome"] in FINE and row["seconds"] > SECONDS:
            row["outcome"] = "slow"
        if row["outcome"] in FINE and row["bytes"] > BYTES:
            row["outcome"] = "memory"
        if audit.seen:
            row.update(outcome="outside", text="; ".join(audit.seen[:5]))
        if row["outcome"] not in FINE:
            row["files"] = {
                n: base64.b64encode(d).decode() for n, d in files.items() if d != base[name].get(n)
            }
        yield row


# ---------------------------------------------------------------- the watch


def watched(
    mode: str, seed: int, folder: Path, first: int, cases: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Rows of all cases, from workers that are replaced when they die, hang or grow."""
    number, end, until = first, first + cases, time.monotonic() + seconds
    while number < end and time.monotonic() < until:
        count = min(BATCH, end - number)
        command = [sys.executable, __file__, "--work", mode, str(seed), str(folder), str(number), str(count)]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as worker,
        ):
            assert worker.stdout is not None
            began, used, buffer, ready = time.monotonic(), 0.0, b"", False
            while time.monotonic() < until:
                if select.select([worker.stdout], [], [], 0.2)[0]:
                    chunk = os.read(worker.stdout.fileno(), 1 << 20)
                    if not chunk:
                        break
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        began, used, ready = time.monotonic(), _used(worker.pid), True
                        if line == b"ready":
                            continue
                        row = json.loads(line)
                        number = row["case"] + 1
                        yield row
                        if row["outcome"] == "memory":
                            worker.kill()  # what is used up stays so: the next case needs a fresh worker
                elif (
                    ready and _used(worker.pid) - used > 2 * SECONDS
                ) or time.monotonic() - began > 30 * SECONDS:
                    yield {"case": number, "outcome": "hang"}
                    number += 1
                    break
                elif ready and _resident(worker.pid) > 2 * BYTES:
                    yield {"case": number, "outcome": "memory"}
                    number += 1
                    break
            stopped = time.monotonic() >= until
            worker.kill()
            code = worker.wait()
            if not stopped and code not in (0, -9):
                errors.seek(0)
                yield {
                    "case": number,
                    "outcome": "crash",
                    "code": code,
                    "text": errors.read()[-600:].decode(errors="replace"),
                }
                number += 1


def _used(pid: int) -> float:
    """Seconds of a core that a process has had: what counts where others have the cores, too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _worker(mode: str, seed: str, folder: str, first: str, cases: str) -> None:
    """What a worker's process does: a row a line."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=folder)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no row
    for row in work(mode, int(seed), Path(folder), iter(range(int(first), int(first) + int(cases)))):
        out.write(json.dumps(row) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        _worker(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="Load mutated artifacts.")
    parser.add_argument("--hashes", choices=["on"], help="damage files; every load checks all hashes")
    parser.add_argument(
        "--fixed-up",
        action="store_true",
        help="rewrite manifest, programs and tensors, and put hashes, names and digest right",
    )
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="one case alone, with all that is known of it")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, help="a folder of artifacts; made there where it is empty")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    mode = "fixed-up" if given.fixed_up else "hashes"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as made:
        folder = given.corpus or Path(made)
        folder.mkdir(exist_ok=True)
        if not list(folder.glob("*.wide")):
            corpus(folder)
        count: Counter[str] = Counter()
        ways: Counter[str] = Counter()
        failed: list[dict[str, Any]] = []
        longest, largest = 0.0, 0
        start = time.monotonic()
        first, cases = (given.case, 1) if given.case is not None else (given.first, given.cases)
        for row in watched(mode, given.seed, folder, first, cases, given.seconds):
            count[row["outcome"]] += 1
            ways[f"{row.get('how', '?')}: {row['outcome']}"] += 1
            longest, largest = max(longest, row.get("seconds", 0.0)), max(largest, row.get("bytes", 0))
            if row["outcome"] not in (*FINE, "none"):
                failed.append(row)
                print(
                    json.dumps({k: v for k, v in row.items() if k != "files"})[:1500],
                    file=sys.stderr,
                    flush=True,
                )
            if given.case is not None:
                print(json.dumps({k: v for k, v in row.items() if k != "files"}, indent=1))
        for left in [*folder.glob("at-work-*"), *folder.glob("tmp*")]:
            shutil.rmtree(left, ignore_errors=True)
    took = time.monotonic() - start
    run = {
        "mode": mode,
        "seed": given.seed,
        "first": first,
        "cases": sum(count.values()),
        "seconds": round(took, 1),
        "seconds_of_a_core": round(
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            + resource.getrusage(resource.RUSAGE_CHILDREN).ru_stime,
            1,
        ),
        "outcomes": dict(count.most_common()),
        "longest_s": longest,
        "largest_rss_bytes": largest,
        "failed": failed,
        "ways": dict(sorted(ways.items())),
    }
    print(json.dumps({k: v for k, v in run.items() if k not in ("failed", "ways")}, indent=1))
    if given.output:
        runs = json.loads(given.output.read_text()) if given.output.exists() else []
        given.output.write_text(json.dumps([*runs, run], indent=1) + "\n")


if __name__ == "__main__":
    main()

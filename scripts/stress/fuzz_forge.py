"""Forges artifacts: changes manifest, programs or tensors, and corrects hashes, names and digest."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from fuzz_files import Files
from fuzz_json import INTS, mutate_json
from fuzz_nodes import add_node


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
        changes.append(how)
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
        data = (
            json.dumps(documents[name], separators=(",", ":")).encode("utf-8", "surrogatepass")
            if name in documents
            else old
        )
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
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    body["digest"] = "sha256:" + hashlib.sha256(text).hexdigest()
    result["manifest.json"] = json.dumps(
        body, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode("utf-8", "surrogatepass")
    return result

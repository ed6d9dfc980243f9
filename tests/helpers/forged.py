"""Forges artifacts: changes any file of a golden artifact, then corrects the hashes, names and digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paths import GOLDEN as GOLDEN


def golden(name: str) -> Path:
    """Returns the newest golden artifact with this name."""
    return max(GOLDEN.glob(f"????-??-??-{name}.wide"))


class Forged:
    """An artifact before it is written. documents: its JSON files by name. files: the bytes of the others."""

    def __init__(self, name: str = "mlp") -> None:
        source = golden(name)
        every = {
            p.relative_to(source).as_posix(): p.read_bytes() for p in sorted(source.rglob("*")) if p.is_file()
        }
        self.documents: dict[str, Any] = {n: json.loads(d) for n, d in every.items() if n.endswith(".json")}
        self.files = {n: d for n, d in every.items() if n not in self.documents}

    @property
    def manifest(self) -> Any:
        return self.documents["manifest.json"]

    @property
    def entry(self) -> Any:
        return self.manifest["entries"]["forward"]

    def programs(self, start: str = "programs/cpu.") -> list[Any]:
        """Returns the wide programs for a CPU, or others by the start of their names."""
        return [d for n, d in self.documents.items() if n.startswith(start)]

    def add(self, *nodes: dict[str, Any], start: str = "programs/cpu.") -> Forged:
        """Inserts nodes at the start of every program."""
        for program in self.programs(start):
            program["nodes"] = [*nodes, *program["nodes"]]
        return self

    def change(self, suffix: str, how: Callable[[bytes], bytes]) -> Forged:
        """Changes the bytes of the files whose names end or begin with `suffix`."""
        for name in self.files:
            if name.endswith(suffix) or name.startswith(suffix):
                self.files[name] = how(self.files[name])
        return self

    def save(self, folder: Path, seal: bool = True) -> Path:
        """Writes the artifact. seal: with correct hashes, names and digest."""
        renamed: dict[str, str] = {}
        table: dict[str, Any] = {}
        rows = {
            **self.files,
            **{n: json.dumps(d).encode() for n, d in self.documents.items() if n != "manifest.json"},
        }
        path = folder / "forged.wide"
        for name, data in rows.items():
            sha256 = hashlib.sha256(data).hexdigest()
            renamed[name] = (
                f"{name.rsplit('-', 1)[0]}-{sha256[:16]}.{name.rsplit('.', 1)[1]}" if seal else name
            )
            table[renamed[name]] = {"bytes": len(data), "sha256": sha256}
            place = path / renamed[name]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)

        def to(value: Any) -> Any:
            if isinstance(value, str):
                return renamed.get(value, value)
            if isinstance(value, list):
                return [to(v) for v in value]
            return {k: to(v) for k, v in value.items()} if isinstance(value, dict) else value

        body = {k: to(v) for k, v in self.manifest.items() if k not in ("digest", "files")}
        extra = {
            n: f for n, f in self.manifest["files"].items() if n not in rows
        }  # the nodes that a test has put into the list
        body["files"] = {**table, **extra} if seal else self.manifest["files"]
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        body["digest"] = "sha256:" + hashlib.sha256(text).hexdigest() if seal else self.manifest["digest"]
        (path / "manifest.json").write_text(json.dumps(body, ensure_ascii=False))
        return path


def node(name: str, op: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns a node in the form of a program file."""
    return {"name": name, "op": op, "args": list(args), **({"kwargs": kwargs} if kwargs else {})}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}

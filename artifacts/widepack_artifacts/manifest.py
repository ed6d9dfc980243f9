"""Reads and writes the manifest of an artifact as frozen dataclasses. No torch is imported.

| class | content | module |
|---|---|---|
| `Manifest` | versions, members, weights, entries, probe, records, list of files | this |
| `Member` | a checkpoint: its name, its source and its hash | this |
| `Weight` | a row of the weights table: kind, dtype, shape in one member, role | `manifest_weights` |
| `FactoredWeight` | a weight that is stored as a base and low-rank factors | `factored` |
| `Entry` | a named program: inputs, calling convention, outputs, dims, guards, programs | `entry` |
| `StateDicts` | what the members' state dicts have beside tensors | `state_dicts` |
| `File` | the size and hash of a file | `file_list` |

`from_json` accepts exactly what `to_json` writes. It refuses unknown keys, other types and values out of
bounds, and the error names what was expected. FORMAT.md has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from . import strict_json
from .entry import Entry
from .errors import some
from .factored import Factored
from .fields import (
    IDENTIFIER,
    check_unique,
    manifest_error,
    read_count,
    read_free_object,
    read_list,
    read_map,
    read_name,
    read_object,
    read_sha256,
    read_text,
)
from .file_list import File, check_file_name, read_file_name
from .format_version import FORMAT, check_version
from .manifest_weights import FACTOR, Weight, check_ragged_names
from .state_dicts import StateDicts

MAX_BYTES = 256 * 2**20
MAX_MEMBERS = 2**16
_KEYS = (
    "format",
    "version",
    "members",
    "weights",
    "entries",
    "probe",
    "verification",
    "provenance",
    "state",
    "files",
    "digest",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the artifact.

    `name` is unique in the artifact. `source` is the checkpoint as the user gave it. `bytes` and `sha256` are
    the size and the hash of that file.
    """

    name: str
    source: str
    sha256: str
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "source": self.source, "sha256": self.sha256, "bytes": self.bytes}

    @classmethod
    def from_json(cls, data: Any, where: str = "a member") -> Member:
        d = read_object(data, where, ("name", "source", "sha256", "bytes"))
        return cls(
            read_name(d["name"], f"{where}: name"),
            read_text(d["source"], f"{where}: source"),
            read_sha256(d["sha256"], where),
            read_count(d["bytes"], f"{where}: bytes"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`.

    `files` lists every other file of the folder. `digest` is `sha256:<hex>` of the canonical JSON without the
    key `digest`; it is empty until `sealed`. `verification` and `provenance` are records for people and
    tools; no reader depends on them, except that the probe takes its bounds from `verification`. `state` has
    the names of all entries' states; format 1.0 has none. `weights` are the stored weights, and `factored`
    the weights of members that are computed from them. `state_dicts` is what the members' state dicts have
    beside tensors; artifacts before format 1.5 do not say it.
    """

    version: tuple[int, int] = (1, 0)
    members: tuple[Member, ...]
    weights: tuple[Weight, ...]
    factored: Factored = field(default_factory=Factored)
    state_dicts: StateDicts = field(default_factory=StateDicts)
    entries: dict[str, Entry]
    probe: str = ""
    verification: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    state: list[str] = field(default_factory=list)
    files: dict[str, File] = field(default_factory=dict)
    digest: str = ""

    @property
    def entry(self) -> str:
        """The default entry: `forward`, or the first entry if no entry has that name."""
        return "forward" if "forward" in self.entries else next(iter(self.entries))

    @property
    def member_weights(self) -> tuple[Weight, ...]:
        """The weights of the members' state dicts and programs. A factored weight counts as Stacked."""
        stored = tuple(w for w in self.weights if w.role != FACTOR)
        table = {w.name: w for w in self.weights}
        return stored + tuple(w.weight(table) for w in self.factored.weights)

    def sealed(self, files: Mapping[str, File]) -> Manifest:
        """Returns this manifest with a list of files, the version that it needs, and its digest."""
        states = state_names(self.entries)
        filled = replace(
            self,
            version=self._least_version(),
            state=states or self.state,
            files=dict(sorted(files.items())),
            digest="",
        )
        body = filled.to_json()
        del body["digest"]
        return replace(filled, digest=strict_json.digest(body))

    def _least_version(self) -> tuple[int, int]:
        """Returns the lowest version that has all keys of this manifest."""
        entries = self.entries.values()
        if self.state_dicts.needed or any(e.has_fields or e.literals for e in entries):
            return (1, 5)
        if self.factored.weights:
            return (1, 4)
        if any(w.members is not None for e in entries for w in e.wide):
            return (1, 3)
        if any(e.rows is not None for e in entries):
            return (1, 2)
        return (1, 1) if any(e.state for e in entries) else (1, 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": list(self.version),
            "members": [m.to_json() for m in self.members],
            "weights": [w.to_json() for w in self.weights],
            **({"factored": self.factored.to_json()} if self.factored.weights else {}),
            **({"state_dicts": self.state_dicts.to_json()} if self.state_dicts.needed else {}),
            "entries": {n: e.to_json() for n, e in self.entries.items()},
            "probe": self.probe,
            "verification": self.verification,
            "provenance": self.provenance,
            "state": self.state,
            "files": {n: f.to_json() for n, f in self.files.items()},
            "digest": self.digest,
        }

    def to_bytes(self) -> bytes:
        """Returns the content of `manifest.json`: the canonical JSON and a newline."""
        return strict_json.canonical(self.to_json()) + b"\n"

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Reads and checks a manifest: format and version, then the digest, then every field.

        Raises: ArtifactError if the data is not exactly a manifest of this version.
        """
        check_version(data)
        factored = tuple(data["version"]) >= (1, 4) and "factored" in data
        described = tuple(data["version"]) >= (1, 5) and "state_dicts" in data
        optional = (*(["factored"] if factored else []), *(["state_dicts"] if described else []))
        d = read_object(data, "the top level", (*_KEYS, *optional))
        _check_digest(d)
        version: tuple[int, int] = (d["version"][0], d["version"][1])
        files = read_map(d["files"], "files", File.from_json)
        for name, file in files.items():
            check_file_name(name, file)
        members = _read_members(d["members"])
        weights = _read_weights(d["weights"], len(members))
        if not factored and any(w.role == FACTOR for w in weights):
            raise manifest_error(f"weights: a weight has the role {FACTOR}, and there is no key factored")
        products = Factored.from_json(d["factored"], weights, len(members), files) if factored else Factored()
        entries = _read_entries(d["entries"], len(members), files, version)
        _check_initial_weights(entries, weights)
        if version >= (1, 1):
            _check_state(d["state"], entries)
        return cls(
            version=version,
            members=members,
            weights=weights,
            factored=products,
            state_dicts=StateDicts.from_json(d["state_dicts"], files) if described else StateDicts(),
            entries=entries,
            probe=d["probe"] if d["probe"] == "" else read_file_name(d["probe"], files, "probe"),
            verification=read_free_object(d["verification"], "verification"),
            provenance=read_free_object(d["provenance"], "provenance"),
            state=read_list(d["state"], "state", read_name),
            files=files,
            digest=d["digest"],
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads the content of `manifest.json`. Raises: ArtifactError."""
        return cls.from_json(strict_json.parse(data, "manifest"))


def state_names(entries: Mapping[str, Entry]) -> list[str]:
    """Returns the names of all entries' states, each once, in the order of the entries' names."""
    return list(dict.fromkeys(name for _, entry in sorted(entries.items()) for name in entry.states))


def _check_digest(d: Mapping[str, Any]) -> None:
    """Refuses a manifest whose content has another digest than it records."""
    if not isinstance(d["digest"], str) or not _DIGEST.match(d["digest"]):
        raise manifest_error(f"digest: expected sha256: and 64 hex digits, got {str(d['digest'])[:80]!r}")
    actual = strict_json.digest({k: v for k, v in d.items() if k != "digest"})
    if actual != d["digest"]:
        raise manifest_error(
            f"its digest is {d['digest']}, but its content has {actual}. "
            "It was changed or damaged after it was written; copy or build the artifact again"
        )


def _read_members(value: Any) -> tuple[Member, ...]:
    members = tuple(read_list(value, "members", Member.from_json))
    if not 1 <= len(members) <= MAX_MEMBERS:
        raise manifest_error(f"{len(members)} members; an artifact has 1 to {MAX_MEMBERS}")
    check_unique([m.name for m in members], "members")
    return members


def _read_weights(value: Any, members: int) -> tuple[Weight, ...]:
    weights = tuple(read_list(value, "weights", lambda v, w: Weight.from_json(v, members, w)))
    check_unique([name for w in weights for name in (w.name, *w.aliases)], "weights")
    check_ragged_names(weights, members)
    return weights


def _read_entries(
    value: Any, members: int, files: Mapping[str, File], version: tuple[int, int]
) -> dict[str, Entry]:
    entries = read_map(value, "entries", lambda v, w: Entry.from_json(v, members, files, w, version))
    for name in entries:
        if not IDENTIFIER.match(name):
            raise manifest_error(
                f"entries: {name[:80]!r} is not a valid name of an entry; use letters, digits and _"
            )
    if not entries:
        raise manifest_error("entries: an artifact has at least one")
    return entries


def _check_initial_weights(entries: Mapping[str, Entry], weights: tuple[Weight, ...]) -> None:
    """Refuses a state whose initial weight is not stored, is Ragged, or has another type than the state,
    and a literal over a weight that is not stored.
    """
    table = {w.name: w for w in weights if w.role != FACTOR}
    for name, entry in entries.items():
        for weight in (w for literal in entry.literals for w in literal.weights):
            if weight not in table:
                raise manifest_error(f"entries: {name}: the literal {weight[:80]!r} is no stored weight")
        for state in entry.state:
            if not state.initial:
                continue
            row, leaf = table.get(state.initial), entry.inputs[state.input]
            if (
                row is None
                or row.kind == "ragged"
                or f"{row.dtype}[{','.join(map(str, row.shape))}]" != leaf.type
            ):
                actual = "is not in the table" if row is None else f"is {row.kind} {row.dtype}{row.shape}"
                raise manifest_error(
                    f"entries: {name}: the state {leaf.name[:80]} is {leaf.type[:80]}, "
                    f"but its initial weight {state.initial[:80]!r} {actual}"
                )


def _check_state(value: Any, entries: Mapping[str, Entry]) -> None:
    """Refuses a list of states other than the states of the entries."""
    names = state_names(entries)
    if value != names:
        raise manifest_error(
            f"state: the states of the entries are {some(n[:60] for n in names) or 'none'}; got "
            f"{str(value)[:80]}"
        )

"""`widepack.update`, `append` and `drop`: members of an artifact come and go.

The member programs that are in the artifact stand for the model, so none of the user's code is needed. A newcomer is held to the artifact's table of weights; then

1. the weights files are written again (rewriting.py);
2. where the number of members, a kind or a shape is another, the wide programs that it concerns are lowered again by rules of thumb, the torch.export programs with
   them, and plans that were measured for what was are left out; else programs and measured plans stay;
3. comparison (b) is made again for all members, and the probe with it (reproving.py);
4. one rename publishes the result: the old artifact or the new one, whatever happens.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts import weights as weight_files
from widepack_artifacts.writer import Reader, Writer

from ..planning import plan_cache
from ..verification import probe
from ..checkpoints.newcomer import Newcomer, newcomer
from ..checkpoints.discovery import listed, member_names
from ..spec.entries import FORWARD, PATTERNS
from ..errors import ArtifactError, MemberMismatch, UsageError, VerificationError
from ..capture.pt2.factory import Programs
from ..checkpoints.alignment import Factory, read_names
from ..building.factories import find_factory
from ..spec.names import checkpoint_of, numbers_of, path_of
from ..planning.plan import Plan
from ..system.progress import Report, Stages
from ..registry.registry import Choice, strategy_names
from .prove import Proof, Tried
from ..ir.at_rest import draws
from .weights import NewTable, Seat, new_table, rewrite
from ..spec.input_spec import parse_size
from .artifact_entry import Standing
from ..spec.state import BUFFER
from ..verification.reference import not_finite
from ..version import __version__
from ..lowering.wide_programs import Wide, make_wides, same_programs
from ..building.write import SHARD_SIZE, kinds_out, write_exported, write_tensors, write_wides

_TRIES = 5


@dataclass(frozen=True)
class ReviseReport:
    """What became of an artifact.

    did: `update`, `append` or `drop`. members: all names. changed: name, source and SHA-256 of each member that came, the name of each that went. kinds: weights that
    are of another kind now, with bytes before and after. lowered: the entries whose programs were lowered again. left_out: measured plans that are not in the
    artifact any more, and why. written: how the weights came over: `reflink`, `kernel`, `copy`, `streamed` or `kept`. asked: whose own modules the captured program
    was held to again. weights: bytes by kind. seconds: by stage. not_finite: as of a build. before, digest: the digests of the artifact that was and of the one that is.
    """

    path: str
    did: str
    members: tuple[str, ...]
    changed: list[dict[str, Any]]
    kinds: list[dict[str, Any]]
    lowered: list[str]
    left_out: list[str]
    written: str
    asked: list[str]
    weights: dict[str, int]
    bytes_disk: int
    seconds: dict[str, float]
    before: str
    digest: str
    verification: dict[str, Any] = field(default_factory=dict)
    not_finite: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Path_ = str | PathLike[str]
Model = str | Callable[..., nn.Module] | None


def update(
    path: Path_,
    members: Mapping[int | str, str | Path],
    *,
    out: Path_ | None = None,
    force: bool = False,
    key: str | None = None,
    trust_pickle: bool = False,
    model: Model = None,
    model_args: Mapping[str, Any] | None = None,
    max_shard_size: int | str | None = None,
    progress: Report | None = None,
) -> ReviseReport:
    """Put other checkpoints in the places of members.

    path: the artifact. members: {number or name: checkpoint}; names and order stay. out: write the result there, and leave the artifact as it is; force: also where an
    artifact is. key, trust_pickle: as `build` takes them. model, model_args: where they are given, each newcomer's own module is held to the captured program.
    max_shard_size: as `build` takes it: all weights files are written anew then; without it files stay of the size that the artifact was built with.
    progress: called with (stage, done, total).
    Raises: UsageError, CheckpointError, MemberMismatch, LoweringError, VerificationError, ArtifactError. Nothing is published then.
    """

    def seats(manifest: form.Manifest, arrive: Callable[[str | Path], Newcomer]) -> list[Seat]:
        chosen = dict(zip(numbers_of([m.name for m in manifest.members], list(members)), given))
        return [Seat(m.name, None, arrive(chosen[i]), i) if i in chosen else Seat(m.name, i, place=i) for i, m in enumerate(manifest.members)]

    if not isinstance(members, Mapping):
        raise UsageError(f"members is a {type(members).__name__}; give which member gets which checkpoint, for example {{3: 'new.pt'}}")
    given = [Path(checkpoint_of(value, f"the checkpoint of member {who!r}")) for who, value in members.items()]
    return _again(path, out, lambda: _revise("update", path, seats, out, force, key, trust_pickle, model, model_args, max_shard_size, progress))


def append(
    path: Path_,
    checkpoints: Sequence[str | Path],
    *,
    names: str | Path | Sequence[str] | None = None,
    out: Path_ | None = None,
    force: bool = False,
    key: str | None = None,
    trust_pickle: bool = False,
    model: Model = None,
    model_args: Mapping[str, Any] | None = None,
    max_shard_size: int | str | None = None,
    progress: Report | None = None,
) -> ReviseReport:
    """Add members behind those that are there.

    checkpoints, names: as `build` takes them; no name may be that of a member. The rest: as `update`.
    Raises: as `update`.
    """
    paths = listed(checkpoints, "widepack append ens.wide new.pt")
    given = read_names(names, len(paths)) if names is not None else member_names(paths)

    def seats(manifest: form.Manifest, arrive: Callable[[str | Path], Newcomer]) -> list[Seat]:
        there = [m.name for m in manifest.members]
        if twice := [name for name in given if name in there]:
            raise UsageError(
                f"{', '.join(twice)}: a member of {path} is called so already; name the newcomers otherwise (names=[...], --names), or put them in its place: widepack update"
            )
        stay = [Seat(name, i, place=i) for i, name in enumerate(there)]
        come = [arrive(p) for p in paths]
        return stay + [Seat(name, None, one, k % len(there)) for k, (name, one) in enumerate(zip(given, come))]

    return _again(path, out, lambda: _revise("append", path, seats, out, force, key, trust_pickle, model, model_args, max_shard_size, progress))


def drop(
    path: Path_,
    members: Sequence[int | str],
    *,
    out: Path_ | None = None,
    force: bool = False,
    max_shard_size: int | str | None = None,
    progress: Report | None = None,
) -> ReviseReport:
    """Take members out. members: numbers or names; at least one member stays. The rest, and raises: as `update`."""

    def seats(manifest: form.Manifest, arrive: Callable[[str | Path], Newcomer]) -> list[Seat]:
        gone = set(numbers_of([m.name for m in manifest.members], members))
        if len(gone) == len(manifest.members):
            raise UsageError(f"drop names all {len(gone)} members of {path}; an artifact has at least one: remove the folder instead")
        return [Seat(m.name, i, place=i) for i, m in enumerate(manifest.members) if i not in gone]

    return _again(path, out, lambda: _revise("drop", path, seats, out, force, None, False, None, None, max_shard_size, progress))


def _again(path: Path_, out: Path_ | None, once: Callable[[], ReviseReport]) -> ReviseReport:
    """Do it, and again where another artifact is published while the one that is there is read: only where it is the one that is written nobody can."""
    path = path_of(path)
    if out is not None:
        path_of(out, "out")
    for left in reversed(range(_TRIES)):
        first = Reader(path)  # what is no artifact is told before anything is made at the path
        try:
            return once()
        except ArtifactError:
            if out is None or not left or not first.replaced():
                raise
    raise AssertionError("the last try returns or raises")


def _revise(
    did: str,
    path: Path_,
    seats_of: Callable[[form.Manifest, Callable[[str | Path], Newcomer]], list[Seat]],
    out: Path_ | None,
    force: bool,
    key: str | None,
    trust_pickle: bool,
    model: Model,
    model_args: Mapping[str, Any] | None,
    max_shard_size: int | str | None,
    progress: Report | None,
) -> ReviseReport:
    most = None if max_shard_size is None else parse_size(max_shard_size)
    stages = Stages(progress)
    with Writer(path if out is None else out, force=force or out is None) as writer:
        reader = Reader(path)  # under the lock, where it is the one that is written: nobody publishes in between
        old = reader.manifest
        for name, entry in old.entries.items():
            if any(draws(reader.program(f)) for f in entry.member):
                raise UsageError(
                    f"{did}: entry {name} of {path} draws random numbers at every call (dropout that is on), and its programs are not written again for other members: build it again"
                )
        with stages.stage("read"):
            seats = seats_of(old, lambda p: newcomer(old, p, key, trust_pickle))
            modules = _modules(seats, model, model_args, list(old.entries))
        with stages.stage("check"):  # what is damaged is not given a new hash
            reader.check_hashes([*(p.name for p in reader.weights_files()), *([old.probe] if old.probe else [])])
            held = weight_files.Weights(reader.weights_files())
            held.check(old.weights, len(old.members))
            table = new_table(old, held, seats)
        probed = weight_files.Weights([reader.path(old.probe)]) if old.probe else None
        made = {name: _Made(name, row, reader, table, seats, probed) for name, row in old.entries.items()}
        asked = _asked(old)
        with stages.stage("lower"):
            for one in made.values():
                one.lower(asked)
        with stages.stage("write weights"):
            files, written = rewrite(writer, reader, table, seats, most, stages.step)
        with stages.stage("verify"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a member warns of at the sizes that are tried is no news
            places = [writer.place(f) for f in files]
            now = weight_files.Weights(places)
            for one in made.values():
                one.prove(now, places, seats, modules, stages, asked, probe.record_of(old.verification, one.name))
        with stages.stage("export"):
            entries = {name: one.write(writer, reader) for name, one in made.items()}
            probes = {at: found for one in made.values() for at, found in one.probed.items()}
            probe_name = write_tensors(writer, "probe", probe.make(probes)) if old.probe else ""
        with stages.stage("publish"):
            members = tuple(old.members[s.old] if s.old is not None else _member(s) for s in seats)
            changed = _changed(old, seats)
            heard = [seats[i].name for i in sorted(modules)] if any(one.heard for one in made.values()) else []
            history = {
                "did": did,
                "members": changed,
                "kinds": [k.to_json() for k in table.changed],
                "from": old.digest,
                "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:2000],
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "widepack": __version__,
                "torch": torch.__version__,
                "asked": heard,
            }
            verification = probe.joined({one.name: one.record for one in made.values()})
            sized = {} if most is None else {SHARD_SIZE: most}
            provenance = {**old.provenance, **sized, "history": [*_list(old.provenance.get("history")), history]}
            manifest = writer.publish(
                replace(
                    old,
                    members=members,
                    weights=table.weights,
                    entries=entries,
                    probe=probe_name,
                    verification=verification,
                    provenance=provenance,
                )
            )
    for one in made.values():
        one.carry(old.digest, manifest.digest)
    return ReviseReport(
        path=os.fspath(path if out is None else out),
        did=did,
        members=tuple(s.name for s in seats),
        changed=changed,
        kinds=[k.to_json() for k in table.changed],
        lowered=[one.name for one in made.values() if one.wides],
        left_out=[words for one in made.values() for words in one.left_out],
        written=written,
        asked=heard,
        weights={k: sum(w.bytes(table.count) for w in table.weights if w.kind == k) for k in form.KINDS},
        bytes_disk=sum(f.bytes for f in manifest.files.values()),
        seconds=stages.seconds,
        before=old.digest,
        digest=manifest.digest,
        verification=verification,
        not_finite=not_finite({one.name: one.record for one in made.values()}),
    )


class _Made:
    """An entry in the making. other: whether its programs have to be lowered again. wides: those that were. left_out: measured plans that are gone, and why."""

    def __init__(
        self, name: str, row: form.Entry, reader: Reader, table: NewTable, seats: Sequence[Seat], probed: weight_files.Weights | None
    ) -> None:
        self.name, self.row, self.reader = name, row, reader
        by_name = {w.name: w for w in table.weights}
        self.entry = Standing(name, row, [reader.program(f) for f in row.member], [s.like for s in seats], by_name, probed)
        was = {w.name: w for w in reader.manifest.weights}
        self.why = (
            f"measured with {len(reader.manifest.members)} members, and there are {len(seats)}"
            if len(seats) != len(reader.manifest.members)
            else "measured with weights of other kinds or shapes"
            if any(was[n] != by_name[n] for n in self.entry.reads())
            else "measured with other shapes of the members"
            if [row.member[s] for s in row.signatures] != [self.entry.files[s] for s in self.entry.signatures]
            else ""
        )
        self.other = bool(self.why)
        self.wides: list[Wide] = []
        self.measured = [w for w in row.wide if w.plan.get("machine")]
        self.left_out: list[str] = []
        self.record: dict[str, Any] = {}
        self.probed: dict[str, probe.Answers] = {}
        self.heard = False  # whether newcomers' own modules were
        if self.other:
            self._leave_out(self.measured, self.why)

    def _leave_out(self, rows: Iterable[form.WideProgram], why: str) -> None:
        for w in rows:
            plan = Plan.from_json(w.plan)
            most = "any" if w.batch[1] is None else w.batch[1]
            self.left_out.append(f"{self.name}, {w.pattern}, batch {w.batch[0]} to {most}, {plan.machine}, {plan.threads} threads: {why}")
        gone = {id(w) for w in rows}
        self.measured = [w for w in self.measured if id(w) not in gone]

    def lower(self, asked: Choice) -> None:
        """Wide programs by rules of thumb, where those that are there hold no more; plain ones where a build took plain ones."""
        self.wides = self._lowered(replace(asked, plain=any(w.plan.get("plain") for w in self.row.wide))) if self.other else []

    def _lowered(self, asked: Choice) -> list[Wide]:
        targets = list(dict.fromkeys(w.device for w in self.row.wide if not w.plan.get("machine"))) or ["cpu"]
        return make_wides(self.entry, asked, targets)

    def prove(
        self,
        held: weight_files.Weights,
        files: Sequence[Path],
        seats: Sequence[Seat],
        modules: Mapping[int, Callable[[], nn.Module]],
        stages: Stages,
        asked: Choice,
        before: Mapping[str, Any],
    ) -> None:
        """All comparisons of this entry. held, files: the weights that were written. before: the record that there is. Raises: VerificationError."""
        # the manifest does not tell a state that is returned from one that is changed in place
        own = modules if all(s.how == BUFFER for s in self.entry.states) else {}
        self.heard = bool(own)
        proof = Proof(self.entry, [s.name for s in seats], held, files, [s.place for s in seats], stages, own)
        try:
            records, wrong = proof.check(self._tried())
        except VerificationError:
            plain = replace(asked, plain=True)
            others = self._lowered(plain)
            if same_programs(others, self.wides) or any(w.plan.get("plain") for w in self.row.wide):
                raise
            self.wides = others
            records, wrong = proof.check(self._tried())
        hashed = self.reader.manifest.files
        for why in dict.fromkeys(wrong.values()):
            self._leave_out([w for w in self.measured if wrong.get(_key(w, hashed)) == why], why)
        self.record, self.probed = proof.record(records, before, [s.name for s in seats if s.new is None]), proof.probed()

    def carry(self, before: str, after: str) -> None:
        """Plans in the user's cache are kept for the new artifact too, where its programs are those that they were measured with."""
        for pattern, device in itertools.product(PATTERNS, ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]):
            with contextlib.suppress(OSError, UsageError):  # a cache that cannot be written costs a measurement
                if not self.wides:
                    plan_cache.carry(before, after, self.name, pattern, device)
                elif plan_cache.find(before, self.name, pattern, device):
                    self.left_out.append(f"{self.name}, {pattern}, {device}, kept in your cache: {self.why or 'its programs were lowered again'}")

    def _tried(self) -> list[Tried]:
        """The wide programs that are to be proved: those by rules of thumb, then those that were measured, each once."""
        files = self.reader.manifest.files
        rules = {_key(w, files): w for w in self.row.wide if not w.plan.get("machine")} if not self.wides else {}
        made = [Tried(w.pattern, w.lowered.program, w.plan, lowered=w.lowered) for w in self.wides]
        made += [Tried(w.pattern, self.reader.program(w.file), Plan.from_json(w.plan)) for w in rules.values()]
        measured = {_key(w, files): w for w in self.measured if _key(w, files) not in rules}
        return made + [Tried(w.pattern, self.reader.program(w.file), Plan.from_json(w.plan), key) for key, w in measured.items()]

    def write(self, writer: Writer, reader: Reader) -> form.Entry:
        """The entry for the manifest; its programs are written, or left as they are."""
        writer.take(reader, self.entry.files)
        measured = [w.file for w in self.measured]
        if not self.wides:
            rules = [w for w in self.row.wide if not w.plan.get("machine")]
            writer.take(reader, [*(w.file for w in rules), *measured, *self.row.pt2.values()])
            kept = {id(w) for w in (*rules, *self.measured)}
            return replace(
                self.row,
                wide=tuple(w for w in self.row.wide if id(w) in kept),
                member=self.entry.files,
                signatures=list(self.entry.signatures),
            )
        writer.take(reader, measured)
        outputs = tuple(replace(o, kind=kind) for o, kind in zip(self.row.outputs, kinds_out(self.wides)))
        return replace(
            self.row,
            outputs=outputs,
            member=self.entry.files,
            signatures=list(self.entry.signatures),
            wide=(*write_wides(writer, self.name, self.wides), *self.measured),
            pt2=write_exported(writer, self.entry, self.wides, self.row.pt2),
        )


def _key(wide: form.WideProgram, files: Mapping[str, form.File]) -> str:
    """One program for one pattern, in however many files."""
    return f"{wide.pattern} {files[wide.file].sha256}"


def _asked(manifest: form.Manifest) -> Choice:
    """The strategies that the artifact was built with, as far as they are known here."""
    asked = manifest.provenance.get("strategy")
    known = strategy_names()
    return Choice.parse([name for name in asked if name in known] if isinstance(asked, list) else "auto")


def _modules(seats: Sequence[Seat], model: Model, args: Mapping[str, Any] | None, entries: Sequence[str]) -> dict[int, Callable[[], nn.Module]]:
    """What makes the newcomers' own modules, by seat: the factory that is named, or the program that a checkpoint brings, which is one entry. Raises: UsageError."""
    coming = {i: seat.new for i, seat in enumerate(seats) if seat.new is not None}
    if model is None and args:
        raise UsageError("model arguments are given, but no model")
    found: dict[int, Callable[[], nn.Module]] = {}
    for i, one in coming.items():
        whole = one.checkpoint.program is not None and entries == [FORWARD]
        factory = find_factory(model, args, one.checkpoint.path) if model is not None else Programs() if whole else None
        if factory is not None:
            factory.dtype = None if model is None else one.dtype
            found[i] = partial(_filled, factory, one, seats[i].name)
    return found


def _filled(factory: Factory, one: Newcomer, name: str) -> nn.Module:
    """A newcomer's own module as the user would load it. Raises: MemberMismatch."""
    state = one.aligned.state_dict(0)
    module = factory.of(one.checkpoint, state)
    try:
        module.load_state_dict(state)
    except RuntimeError as e:
        raise MemberMismatch(f"member {name}: the model does not take its checkpoint: {' '.join(str(e).split())[:600]}") from e
    return module.eval()


def _member(seat: Seat) -> form.Member:
    assert seat.new is not None
    one = seat.new.checkpoint
    return form.Member(seat.name, one.path, one.sha256(), one.bytes)


def _changed(old: form.Manifest, seats: Sequence[Seat]) -> list[dict[str, Any]]:
    """Who came and who went, for the record."""
    stay = {s.name for s in seats}
    gone: list[dict[str, Any]] = [{"member": m.name, "left": m.source} for m in old.members if m.name not in stay]
    was = {m.name: m.source for m in old.members}
    come = [(s.name, _member(s)) for s in seats if s.new is not None]
    return gone + [{"member": n, "source": m.source, "sha256": m.sha256, **({"left": was[n]} if n in was else {})} for n, m in come]


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []

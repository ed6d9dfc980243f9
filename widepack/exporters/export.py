"""`widepack.export`: an artifact's program as an ONNX file, or as a `torch.export` program, for whoever runs it without widepack.

What is written is held to the artifact before it appears: the probe's float64 answers, and other sizes. It appears by one rename, whole or not at all.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from ..system import atomic_file as single
from ..spec.entries import PATTERNS
from ..errors import ArtifactError, LoweringError, UsageError, VerificationError, WidepackError
from .subject import Subject, subject_of
from ..system.progress import Report, Stages

FORMS = {"onnx": ("inside", "beside"), "pt2": ("inside", "none")}
"""What can be written, and where its weights may be."""


@dataclass
class ExportReport:
    """What was written.

    path, to, entry, weights: as asked for. pattern: empty for a single member. members: names. inputs, outputs: names and types. files: all that belong together, in bytes.
    opset: of an ONNX file, else 0. initializers, made: of an ONNX file, its weights, and those of them that the weight prologue made. written: `wide`, or `loop` where every op
    stands once a member, and why. checked: what it was held to, or why it was not. unchecked: what widepack holds every call to and the file does not, in words.
    """

    path: str
    to: str
    entry: str
    pattern: str
    members: tuple[str, ...]
    weights: str
    digest: str
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    opset: int = 0
    initializers: int = 0
    made: int = 0
    written: str = "wide"
    why: str = ""
    checked: str = ""
    unchecked: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def export(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    to: str = "onnx",
    entry: str = "",
    pattern: str = "shared",
    member: int | str | None = None,
    members: Sequence[int | str] | None = None,
    weights: str = "inside",
    opset: int | None = None,
    force: bool = False,
    progress: Report | None = None,
) -> ExportReport:
    """Write one program of an artifact in another form.

    path: the artifact. out: the file. to: `onnx` (needs the extra `onnx`) or `pt2`. entry: its name; `forward`, or the only one, where it is left out.
    pattern: `shared` (every member sees the same inputs) or `each`. member: a single one, as it was alone: no member axis. members: some of them, by number or name.
    weights: `inside` the file; for ONNX also `beside`: in the artifact's own files, which the model then points at; for pt2 also `none`. opset: of ONNX, 18 to 23; default 20.
    force: replace a file that is there. progress: called with (stage, done, total).

    Where the wide program cannot be said in ONNX, or not so that ONNX Runtime answers rightly, every op is written once a member; the report says so.
    Returns: an ExportReport. Raises: UsageError; ArtifactError; LoweringError for what cannot be said in that form; VerificationError where the written program does not
    answer as the members do: nothing is left then.
    """
    if to not in FORMS:
        raise UsageError(f"to={to!r} is unknown; known: {', '.join(FORMS)}")
    if weights not in FORMS[to]:
        raise UsageError(f"weights={weights!r} is unknown of {to}; known: {', '.join(FORMS[to])}")
    if pattern not in PATTERNS:
        raise UsageError(f"pattern={pattern!r} is unknown; known: {', '.join(PATTERNS)}")
    if member is not None and members is not None:
        raise UsageError("member and members are both given; member=... writes a single one without member axis, members=[...] some of them as one")
    if member is not None and pattern != "shared":
        raise UsageError(f"a single member has no member axis, and no pattern {pattern!r}; members=[{member!r}] keeps the axis")
    if opset is not None and to != "onnx":
        raise UsageError(f"opset is of ONNX files; to={to!r} has none")
    for what, value in (("path", path), ("out", out)):
        if not isinstance(value, (str, PathLike)):
            raise UsageError(f"{what} is a {type(value).__name__}; give a path")
    place = Path(out)
    stages = Stages(progress)
    read = partial(subject_of, Path(path), entry, pattern, member, members)
    try:
        single.admit(place, force)
        if to == "pt2":
            return _pt2(read, place, weights, force, stages)
        return _onnx(read, Path(path), place, weights, opset, force, stages, ("wide",) if member is not None else ("wide", "loop"))
    except OSError as e:
        raise ArtifactError(f"{place}: cannot be written: {e.strerror or e}; nothing of it is left, and what was there before is as it was") from e


def _onnx(
    read: Callable[[str], Subject], path: Path, out: Path, weights: str, opset: int | None, force: bool, stages: Stages, ways: Sequence[str]
) -> ExportReport:
    """read: gives the subject lowered in one of the ways, which are tried in turn."""
    from . import onnx_file as form

    opset = form.OPSET if opset is None else opset
    if isinstance(opset, bool) or opset not in form.OPSETS:
        raise UsageError(f"opset={opset!r} is none that torch's exporter writes; give one of {form.OPSETS[0]} to {form.OPSETS[-1]}")
    form.needed()
    if weights == "beside":
        form.location(path, out)
    first: WidepackError | None = None
    for how in ways:
        with stages.stage("reading the artifact"):
            subject = read(how)
        report = _report(subject, out, "onnx", weights)
        report.written, report.why = how, str(first or "")
        with single.temporary(out, ".onnx") as temporary:
            try:
                with stages.stage("writing ONNX"):
                    made = form.write(subject, temporary, out, weights, opset)
                try:
                    with stages.stage("holding it to the artifact"):
                        report.checked = form.hold(subject, temporary, made)
                    report.files = {f.name: f.stat().st_size for f in made.beside}
                    single.publish(temporary, out, force)
                except BaseException:
                    form.discard(made)
                    raise
            except (LoweringError, VerificationError) as e:
                if how == ways[-1]:
                    raise first or e from e
                first = e
                continue
        _clear(out, [f.name for f in made.beside])
        report.inputs, report.outputs, report.opset = made.inputs, made.outputs, made.opset
        report.initializers, report.made = made.initializers, made.made
        report.files = {out.name: out.stat().st_size, **report.files}
        report.seconds = dict(stages.seconds)
        return report
    raise AssertionError("one of the two ways has returned or raised")


def _pt2(read: Callable[[str], Subject], out: Path, weights: str, force: bool, stages: Stages) -> ExportReport:
    from . import pt2_file as form

    with stages.stage("reading the artifact"):
        subject = read("wide")
    report = _report(subject, out, "pt2", weights)
    with single.temporary(out, ".pt2") as temporary:
        with stages.stage("writing the program"):
            made = form.write(subject, temporary, weights)
        with stages.stage("holding it to the artifact"):
            report.checked = form.hold(subject, temporary, weights)
        single.publish(temporary, out, force)
    report.inputs, report.outputs, report.initializers = made.inputs, made.outputs, made.weights
    report.files = {out.name: out.stat().st_size}
    report.seconds = dict(stages.seconds)
    return report


def _report(subject: Subject, out: Path, to: str, weights: str) -> ExportReport:
    pattern = "" if subject.single else subject.pattern
    manifest = subject.held.manifest
    return ExportReport(
        str(out), to, subject.name, pattern, subject.model.members, weights, manifest.digest, unchecked=subject.unchecked(of_dims=to == "onnx")
    )


# ---------------------------------------------------------------- files


def _clear(out: Path, kept: Sequence[str]) -> None:
    """Remove files of weights that an earlier export to this path left: the model that pointed at them has been replaced."""
    ours = re.compile(re.escape(out.name) + r"\.[0-9a-f]{16}\.data\Z")
    for path in out.parent.iterdir():
        if ours.match(path.name) and path.name not in kept:
            with contextlib.suppress(OSError):
                path.unlink()

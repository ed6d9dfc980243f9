"""Defines `widepack.export`, which writes a program as an ONNX file or a `torch.export` program.

Before the file appears, its answers are compared with the probe's float64 answers, and with the artifact's
program at other sizes. The file appears by one rename, complete or not at all.
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

from ..errors import ArtifactError, LoweringError, UsageError, VerificationError
from ..runtime.admission import guarded
from ..spec.entries import PATTERNS
from ..system import atomic_file
from ..system.autocast import plain_modes
from ..system.progress import Report, Stages
from .subject import ExportSubject, Written, subject_of

FORMS = {"onnx": ("inside", "beside"), "pt2": ("inside", "none")}
"""The forms that can be written, and for each one where its weights may be."""


@dataclass
class ExportReport:
    """What `widepack.export` wrote, and how it was checked.

    Args:
        path: The file.
        to: Its form, `onnx` or `pt2`.
        entry: The entry's name.
        pattern: `shared` or `each`; empty for a single member.
        members: The names of the members in the file.
        weights: Where the weights are: `inside`, `beside` or `none`.
        digest: The artifact's digest.
        inputs: The inputs' names and types, for example `x=float32[B,16]`.
        outputs: The outputs' names and types.
        files: All files that belong together, by name, with their sizes in bytes.
        opset: The opset of an ONNX file, else 0.
        initializers: The number of weights.
        made: The number of derived weights in an ONNX file.
        written: `wide`, or `loop` if every op is written once for each member.
        why: Why the file is not written as `wide`; else empty.
        checked: What the file's answers were compared with, or `not checked: ` and the reason.
        unchecked: Conditions that widepack checks at every call and the file does not, in words.
        seconds: The time of each stage in seconds.

    Example:
        >>> report = widepack.export("ens.wide", "ens.pt2", to="pt2")
        >>> print(report.outputs, report.checked)
    """

    __module__ = "widepack"  # pickles name the public place

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
        """The size of all files together, in bytes.

        Example:
            >>> report = widepack.export("ens.wide", to="pt2", out="ens.pt2")
            >>> print(report.bytes)
        """
        return sum(self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that `json.dumps` takes.

        Returns:
            A dict with the fields of the report.

        Example:
            >>> print(json.dumps(report.to_json(), indent=2))
        """
        return asdict(self)


@plain_modes()
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
    """Writes one program of an artifact to a file that runs without widepack.

    Before the file appears, its answers are compared with the artifact's: those of an ONNX file in ONNX
    Runtime, those of a pt2 file in torch. Without ONNX Runtime the report says that nothing was compared.

    If ONNX cannot express the wide program, or ONNX Runtime answers wrongly for it, every op is written once
    for each member. The report says so.

    Args:
        path: The artifact.
        out: The file to write.
        to: `onnx` (needs the extra `onnx`) or `pt2` (`torch.export`).
        entry: The entry's name. Default: `forward`, or the only entry.
        pattern: `shared` (all members see the same inputs) or `each` (one input for each member, `[N, ...]`).
        member: A single member, by number or name. Its program has no member axis. Default: all members.
        members: Some members, by number or name. Their program has the member axis. Default: all members.
        weights: `inside` stores them in the file. `beside`, for ONNX, refers to the artifact's files. `none`,
            for `pt2`, leaves them out.
        opset: The opset of an ONNX file, 18 to 23. Default: 20.
        force: Whether to replace an existing file. Default: False.
        progress: Is called with (stage, done, total).

    Returns:
        An `ExportReport`.

    Raises:
        UsageError: The arguments do not fit each other or the artifact, or a package is not installed.
        ArtifactExists: `out` exists, and `force` is False.
        ArtifactError: The artifact is damaged, or the file cannot be written.
        LoweringError: The form cannot express the program.
        VerificationError: The written program does not answer as the members do. Nothing is left then.

    Example:
        >>> report = widepack.export("ens.wide", "ens.onnx")
        >>> report.outputs
        ['output=float32[3,B,10]']
    """
    _check_options(to, pattern, member, members, weights, opset)
    for name, value in (("path", path), ("out", out)):
        if not isinstance(value, (str, PathLike)):
            raise UsageError(f"{name} is a {type(value).__name__}; give a path")
    path, out = Path(path), Path(out)
    stages = Stages(progress)
    try:
        atomic_file.admit(out, force)
        if to == "onnx":
            from . import onnx_file

            opset = onnx_file.checked_opset(opset)
            onnx_file.require_packages()
            if weights == "beside":
                onnx_file.artifact_location(path, out)

        def write(strategy: str) -> ExportReport:
            with stages.stage("reading the artifact"), guarded(f"{path}: a member program"):
                subject = subject_of(path, entry, pattern, member, members, strategy)
            return _write(subject, to, out, weights, opset or 0, force, stages)

        return _wide_or_loop(write, may_loop=to == "onnx" and member is None)
    except OSError as e:
        raise ArtifactError(
            f"{out}: cannot be written: {e.strerror or e}; no part of the new file is left, and an earlier "
            "file is unchanged"
        ) from e


def _check_options(
    to: str,
    pattern: str,
    member: int | str | None,
    members: Sequence[int | str] | None,
    weights: str,
    opset: int | None,
) -> None:
    """Checks that options of `export` are known and fit each other. Raises: UsageError."""
    if to not in FORMS:
        raise UsageError(f"to={to!r} is unknown; known: {', '.join(FORMS)}")
    if weights not in FORMS[to]:
        raise UsageError(f"weights={weights!r} is unknown for to={to!r}; known: {', '.join(FORMS[to])}")
    if pattern not in PATTERNS:
        raise UsageError(f"pattern={pattern!r} is unknown; known: {', '.join(PATTERNS)}")
    if member is not None and members is not None:
        raise UsageError(
            "member and members are both given; member=... writes a single member without the member axis, "
            "members=[...] writes some members with it"
        )
    if member is not None and pattern != "shared":
        raise UsageError(
            f"pattern={pattern!r}: a single member has no member axis; members=[{member!r}] keeps the axis"
        )
    if opset is not None and to != "onnx":
        raise UsageError(f"opset={opset!r} is an option of ONNX files; leave it out for to={to!r}")


def _wide_or_loop(write: Callable[[str], ExportReport], *, may_loop: bool) -> ExportReport:
    """Writes the wide program, or every op once for each member if the form cannot express the wide program,
    or answers wrongly for it. Raises: LoweringError, VerificationError of the wide program if neither works.
    """
    try:
        return write("wide")
    except (LoweringError, VerificationError) as first:
        if not may_loop:
            raise
        try:
            report = write("loop")
        except (LoweringError, VerificationError) as e:
            raise first from e
        report.written, report.why = "loop", str(first)
        return report


def _write(
    subject: ExportSubject, to: str, out: Path, weights: str, opset: int, force: bool, stages: Stages
) -> ExportReport:
    """Writes and checks a file. Raises: LoweringError, VerificationError; no file is left then."""
    with atomic_file.temporary(out, f".{to}") as temporary:
        if to == "onnx":
            from . import onnx_file

            with stages.stage("writing ONNX"):
                model = onnx_file.write(subject, temporary, out, weights, opset)
            written: Written = model
            check = partial(onnx_file.check, subject, temporary, model)
        else:
            from . import pt2_file

            with stages.stage("writing the program"):
                written = pt2_file.write(subject, temporary, weights)
            check = partial(pt2_file.check, subject, temporary, weights)
        try:
            with stages.stage("comparing with the artifact"):
                checked = check()
            data_files = {f.name: f.stat().st_size for f in written.data_files}
            atomic_file.publish(temporary, out, force)
        except BaseException:
            written.discard()
            raise
    if to == "onnx":
        _remove_old_data_files(out, list(data_files))
    return ExportReport(
        path=str(out),
        to=to,
        entry=subject.name,
        pattern="" if subject.single else subject.pattern,
        members=subject.model.members,
        weights=weights,
        digest=subject.artifact.manifest.digest,
        inputs=written.inputs,
        outputs=written.outputs,
        files={out.name: out.stat().st_size, **data_files},
        opset=written.opset,
        initializers=written.initializers,
        made=written.derived,
        checked=checked,
        unchecked=subject.unchecked(with_dims=to == "onnx"),
        seconds=dict(stages.seconds),
    )


def _remove_old_data_files(out: Path, keep: Sequence[str]) -> None:
    """Removes the weights files of the model that the new file replaced."""
    pattern = re.compile(re.escape(out.name) + r"\.[0-9a-f]{16}\.data\Z")
    for path in out.parent.iterdir():
        if pattern.match(path.name) and path.name not in keep:
            with contextlib.suppress(OSError):
                path.unlink()

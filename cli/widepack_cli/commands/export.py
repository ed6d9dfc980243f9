"""`widepack export`: an artifact's program as an ONNX file, or as a torch.export program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from widepack_bench.text import plural, size

from ..shared.options import ARTIFACT, emit, entry_named, entry_option, example, json_option, stdout_kept
from ..shared.progress_bar import Progress


@click.command(
    epilog=example(
        "widepack export ens.wide --to onnx",
        "widepack export ens.wide --to onnx --external -o ens.onnx   # a small file beside ens.wide, whose weights it points at",
        "widepack export ens.wide --to onnx --member fold3 --opset 18",
        "widepack export ens.wide --to pt2 -o ens.pt2",
    )
)
@ARTIFACT
@click.option("--to", "form", type=click.Choice(["onnx", "pt2"]), required=True, help="The form: ONNX, or a program that torch.export.load opens.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The file. Without it: ARTIFACT's name with .onnx or .pt2, in this folder.")
@entry_option
@click.option(
    "--pattern", type=click.Choice(["shared", "each"]), default="shared", show_default=True, help="Inputs that all members share, or one each."
)
@click.option("--member", metavar="MEMBER", help="One member alone, by name or number from 0, as it was without widepack: no member axis.")
@click.option("--members", metavar="A,B,...", help="Some of the members as one, by names or numbers.")
@click.option("--self-contained", "inside", flag_value="inside", help="ONNX: weights in the file (default), past 2 GB in one more beside it.")
@click.option(
    "--external", "inside", flag_value="beside", help="ONNX: no copy of the weights; the file points into ARTIFACT, and stands beside or in it."
)
@click.option("--weightless", is_flag=True, help="pt2: leave the weights out; they are in ARTIFACT.")
@click.option("--opset", type=int, metavar="N", help="ONNX: the opset, 18 to 23. Without it: 20.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@json_option
def command(
    artifact: Path,
    form: str,
    out: Path | None,
    entry: str,
    pattern: str,
    member: str | None,
    members: str | None,
    inside: str | None,
    weightless: bool,
    opset: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write one program of ARTIFACT for whoever runs it without widepack.

    Before the file appears its answers are held to those recorded at build, and to the artifact's program at other sizes: in ONNX Runtime where it is installed, or in
    torch. Inputs, outputs and dynamic dims keep their names; an output is [N, ...], or N outputs NAME@0, NAME@1, ... where members differ in its shape.
    """
    from widepack.spec.names import number_in
    from widepack_artifacts.writer import Reader

    if form == "pt2" and inside:
        raise click.UsageError("--self-contained and --external are of ONNX; a pt2 has its weights inside, or none with --weightless.")
    if form == "onnx" and weightless:
        raise click.UsageError("--weightless is of pt2; an ONNX file without a copy of the weights is --external.")
    manifest = Reader(artifact).manifest
    names = [m.name for m in manifest.members]
    one = None if member is None else number_in(names, member)
    some = None if members is None else [number_in(names, part.strip()) for part in members.split(",")]
    stem = artifact.resolve().name.removesuffix(".wide") + ("" if one is None else f"-{names[one].replace('/', '-')}")
    with stdout_kept(as_json), Progress() as progress:
        import widepack

        report = widepack.export(
            artifact,
            out or Path(f"{stem}.{form}"),
            to=form,
            entry=entry_named(manifest.entries, entry, "forward" if "forward" in manifest.entries else next(iter(manifest.entries))),
            pattern=pattern,
            member=one,
            members=some,
            weights="none" if weightless else inside or "inside",
            opset=opset,
            force=force,
            progress=progress,
        )
    if as_json:
        emit(report.to_json())
        return
    click.echo("\n".join(said(report)))


def said(report: Any) -> list[str]:
    """A report as a person reads it."""
    whose = f"member {report.members[0]}" if not report.pattern else f"{plural(len(report.members), 'member')}, pattern {report.pattern}"
    files = ", ".join(f"{name} ({size(count)})" for name, count in report.files.items())
    where = {"inside": "in the file", "beside": "in the artifact", "none": "left out"}[report.weights]
    derived = f", {report.made} of them made from others" if report.made else ""
    lines = [
        f"wrote {report.path}: {whose}, entry {report.entry}" + (f", ONNX opset {report.opset}" if report.opset else ""),
        f"  files    {files}",
        f"  inputs   {', '.join(report.inputs)}",
        f"  outputs  {', '.join(report.outputs)}",
        f"  weights  {report.initializers}{derived}, {where}",
        f"  checked  {report.checked}",
    ]
    if report.checked.startswith("not"):
        lines[-1] = f"  NOT checked: {report.checked.removeprefix('not checked: ')}"
    if report.written == "loop":
        lines.append(f"  every op stands once a member: {report.why}")
    if report.unchecked:
        lines.append(f"  the file does not check that {', '.join(report.unchecked)}")
    return lines

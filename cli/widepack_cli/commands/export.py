"""`widepack export`: writes a program of an artifact as an ONNX file or as a torch.export program."""

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
        "widepack export ens.wide --to onnx --external -o ens.onnx   # a small file that "
        "reads the weights in ens.wide",
        "widepack export ens.wide --to onnx --member fold3 --opset 18",
        "widepack export ens.wide --to pt2 -o ens.pt2",
    )
)
@ARTIFACT
@click.option(
    "--to",
    "form",
    type=click.Choice(["onnx", "pt2"]),
    required=True,
    help="The file format: ONNX, or a program that torch.export.load opens.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="The file. Default: ARTIFACT's name with .onnx or .pt2, in the current folder.",
)
@entry_option
@click.option(
    "--pattern",
    type=click.Choice(["shared", "each"]),
    default="shared",
    show_default=True,
    help="shared: one set of inputs for all members. each: a separate set for each member.",
)
@click.option(
    "--member",
    metavar="MEMBER",
    help="One member, by name or by number from 0, without a member axis.",
)
@click.option("--members", metavar="A,B,...", help="Some of the members, by names or numbers.")
@click.option(
    "--self-contained",
    "inside",
    flag_value="inside",
    help="ONNX: store the weights in the file (default); above 2 GB in a second file beside it.",
)
@click.option(
    "--external",
    "inside",
    flag_value="beside",
    help="ONNX: store no weights. The file refers to those in ARTIFACT and must be beside it or in it.",
)
@click.option("--weightless", is_flag=True, help="pt2: store no weights; they are in ARTIFACT.")
@click.option("--opset", type=int, metavar="N", help="ONNX: the opset, 18 to 23. Default: 20.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
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
    """Write one program of ARTIFACT to a file that runs without widepack.

    Before the file appears, its answers are compared with those recorded at build, and with the artifact's
    program at other sizes. A pt2 file runs in torch, an ONNX file in ONNX Runtime; without ONNX Runtime it is
    written and reported as not checked. Inputs, outputs and dynamic dims keep their names. An output is
    [N, ...], or N outputs NAME@0, NAME@1, ... if its shape differs between members.
    """
    from widepack.spec.names import number_in
    from widepack_artifacts.reader import Reader

    if form == "pt2" and inside:
        raise click.UsageError(
            "--self-contained and --external are options of ONNX. A pt2 file contains its "
            "weights; --weightless leaves them out."
        )
    if form == "onnx" and weightless:
        raise click.UsageError(
            "--weightless is an option of pt2. For an ONNX file without weights give --external."
        )
    manifest = Reader(artifact).manifest
    names = [m.name for m in manifest.members]
    one = None if member is None else number_in(names, member)
    some = None if members is None else [number_in(names, part.strip()) for part in members.split(",")]
    stem = artifact.resolve().name.removesuffix(".wide") + (
        "" if one is None else f"-{names[one].replace('/', '-')}"
    )
    with stdout_kept(as_json), Progress() as progress:
        import widepack

        report = widepack.export(
            artifact,
            out or Path(f"{stem}.{form}"),
            to=form,
            entry=entry_named(
                manifest.entries,
                entry,
                "forward" if "forward" in manifest.entries else next(iter(manifest.entries)),
            ),
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
    click.echo("\n".join(lines(report)))


def lines(report: Any) -> list[str]:
    """Returns the report as lines of text."""
    whose = (
        f"member {report.members[0]}"
        if not report.pattern
        else f"{plural(len(report.members), 'member')}, pattern {report.pattern}"
    )
    files = ", ".join(f"{name} ({size(count)})" for name, count in report.files.items())
    where = {"inside": "in the file", "beside": "in the artifact", "none": "left out"}[report.weights]
    derived = f", {report.made} of them computed from others" if report.made else ""
    text = [
        f"wrote {report.path}: {whose}, entry {report.entry}"
        + (f", ONNX opset {report.opset}" if report.opset else ""),
        f"  files    {files}",
        f"  inputs   {', '.join(report.inputs)}",
        f"  outputs  {', '.join(report.outputs)}",
        f"  weights  {report.initializers}{derived}, {where}",
        f"  checked  {report.checked}",
    ]
    if report.checked.startswith("not"):
        text[-1] = f"  NOT checked: {report.checked.removeprefix('not checked: ')}"
    if report.written == "loop":
        text.append(f"  every op is written once for each member: {report.why}")
    if report.unchecked:
        text.append(f"  the file does not check that {', '.join(report.unchecked)}")
    return text

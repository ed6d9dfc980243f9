"""Options and report of the commands that change members: `update`, `append`, `drop`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from widepack_artifacts.errors import some
from widepack_bench.text import duration, plural, size

from .options import emit, ignore_option
from .report_lines import damaged, unused_lines

if TYPE_CHECKING:
    from widepack import ReviseReport

F = TypeVar("F", bound=Callable[..., Any])
_WAYS = {
    "reflink": "only the slices of the new members were written; the file shares the rest with the old one",
    "kernel": "the old file was copied, and the slices of the new members were written",
    "copy": "the old file was copied, and the slices of the new members were written",
    "streamed": "all files were written",
    "kept": "unchanged",
}


def out_options(f: F) -> F:
    """`-o`, `--force` and `--max-shard-size`."""
    f = click.option(
        "--max-shard-size",
        metavar="SIZE",
        help="Largest size of a weights file; all weights are written again. Default: as the "
        "artifact was built.",
    )(f)
    f = click.option("--force", is_flag=True, help="Replace an existing artifact at OUT.")(f)
    return click.option(
        "-o",
        "--out",
        type=click.Path(path_type=Path),
        help="Where to write the result. Default: ARTIFACT itself is replaced.",
    )(f)


def checkpoint_options(f: F) -> F:
    """`--key`, `--trust-pickle`, `--ignore` and `--base`."""
    f = click.option(
        "--base",
        metavar="CKPT",
        help="The checkpoint that LoRA adapters among the new members change. Default: the artifact's base.",
    )(f)
    f = ignore_option(f)
    f = click.option(
        "--trust-pickle",
        is_flag=True,
        help="Load the checkpoints with pickle, which can run any code that they contain. Only for files "
        "that you trust.",
    )(f)
    return click.option(
        "--key",
        help="The key of the state dict (such as ema.model) in a checkpoint that contains other values, too. "
        "'*' in it names several members of a file: 'model_*', '*', '[*]'.",
    )(f)


def print_report(report: ReviseReport, as_json: bool) -> None:
    """Prints the report, as lines or as JSON."""
    if as_json:
        emit(report.to_json())
    else:
        click.echo("\n".join(lines(report)))


def lines(report: ReviseReport) -> list[str]:
    """Returns the report as lines of text."""
    weights = ", ".join(f"{size(count)} {kind}" for kind, count in report.weights.items() if count)
    text = [f"{plural(len(report.members), 'member')}: {some(report.members, 20)}"]
    for c in report.changed:
        if "source" not in c:
            text.append(f"{'dropped':<13}{c['member']}, from {c['left']}")
        else:
            text.append(
                f"{'changed' if 'left' in c else 'new':<13}{c['member']} is "
                f"{c['source']}{', was ' + c['left'] if 'left' in c else ''}"
            )
    text.append(f"{'weights':<13}{weights or 'none'}: {_WAYS[report.written]}")
    for k in report.kinds:
        why = "no longer equal in all members" if k["was"] == "shared" else "now of one shape in all members"
        text.append(
            f"{'kind':<13}{k['weight']} is {why}: {k['was']} {size(k['before'])} -> "
            f"{k['kind']} {size(k['after'])}"
        )
    again = "lowered again" + ("" if report.lowered == ["forward"] else f" ({', '.join(report.lowered)})")
    text.append(f"{'programs':<13}{again if report.lowered else 'unchanged'}")
    text += [
        f"{'left out':<13}a measured plan, {words}; run widepack tune to measure again"
        for words in report.left_out
    ]
    if report.uncalibrated:
        text.append(
            f"{'removed':<13}the calibration, which was of the members before; to fit it again: widepack "
            "evaluate --calibrate --save"
        )
    text += unused_lines(report.unused)
    text += damaged(report.not_finite)
    modules = (
        f"; your modules of {some(report.asked)} give the same answers as the captured program"
        if report.asked
        else ""
    )
    text.append(f"{'verified':<13}every wide program against all members in float64, and the probe{modules}")
    text.append(
        f"{'time':<13}{', '.join(f'{stage} {duration(1000 * s)}' for stage, s in report.seconds.items())}"
    )
    return [*text, f"wrote {report.path}, {size(report.bytes_disk)}, now {report.digest}"]

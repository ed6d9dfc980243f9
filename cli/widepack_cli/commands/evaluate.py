"""`widepack evaluate`: measures the members of an ensemble and their mean on data with targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from widepack_bench.text import plural

from ..shared.evaluation_page import page
from ..shared.measuring import check_output, write
from ..shared.options import ARTIFACT, emit, example, json_option, stdout_kept
from ..shared.progress_bar import Progress
from ..shared.row_options import target_arguments, target_options
from ..shared.threads import use_free_cores

if TYPE_CHECKING:
    from widepack import EvaluateReport

MOST = 20  # members that are printed


@click.command(
    epilog=example(
        "widepack evaluate ens.wide --on val.safetensors --target y --of softmax",
        "widepack evaluate ens.wide --on val.csv --target price --input x=f0..f63",
        "widepack evaluate ens.wide --on val.csv --target kind --of softmax --classes cat,dog,bird "
        "--input x=f0..f63",
        "widepack evaluate ens.wide --on val.parquet --target y --of softmax --calibrate --save",
    )
)
@ARTIFACT
@target_options
@click.option(
    "--calibrate",
    is_flag=True,
    help="Fit a temperature of the mean probabilities (numbers: a factor of the variance) on half of the "
    "rows, and show what it does on the others.",
)
@click.option(
    "--save", is_flag=True, help="Record the calibration in ARTIFACT, for predict --calibrated and others."
)
@click.option(
    "--html", "html_file", metavar="FILE", help="Write the report as one self-contained page with plots."
)
@json_option
def command(artifact: Path, html_file: str | None, as_json: bool, **options: Any) -> None:
    """Measure how good the members of ARTIFACT are, and how good their mean is.

    Of classes: accuracy, negative log likelihood (nll), Brier score, expected calibration error (ece), and
    how well the largest probability finds errors (error_auroc). Of numbers: RMSE, mean absolute error, and
    how many targets lie in the intervals that the members' spread gives. The learning curve says what
    fewer members reach.
    """
    check_output("--html", html_file)
    arguments = target_arguments(options)
    with stdout_kept(as_json), Progress() as progress:
        import widepack

        use_free_cores()
        report = widepack.evaluate(artifact, **arguments, progress=progress)
    if html_file is not None:
        write(html_file, page(report))
        click.echo(f"wrote {html_file}", err=True)
    if as_json:
        emit(report.to_json())
    else:
        click.echo("\n".join(lines(report)))


def lines(report: EvaluateReport) -> list[str]:
    """Returns the report as lines of text."""
    names = list(report.ensemble)
    first = names[1] if report.kind == "classes" else names[0]  # nll or rmse
    order = sorted(report.members, key=lambda m: report.members[m][first] or 0.0)
    width = max(len(name) for name in (*report.members, "ensemble"))
    text = [
        f"{plural(report.rows, 'row')}, {plural(len(report.members), 'member')}",
        " ".join([" " * width, *(f"{name:>11}" for name in names)]),
        _row("ensemble", width, [report.ensemble[n] for n in names]),
        *(_row(m, width, [report.members[m].get(n) for n in names]) for m in order[:MOST]),
    ]
    if len(order) > MOST:
        text.append(f"and {len(order) - MOST} more; --json has all")
    curve = ", ".join(f"{row['members']}: {row[first]:.4g}" for row in report.curve)
    what = "pairs that choose different classes" if report.kind == "classes" else "mean deviation of members"
    text += [f"{first} of ensembles of fewer members: {curve}", f"{what}: {report.disagreement:.4g}"]
    text += [
        f"{100 * i['level']:.0f}% intervals: {100 * i['coverage']:.1f}% of the targets are inside, "
        f"mean width {i['width']:.4g}"
        for i in report.intervals
    ]
    bins = [b for b in report.reliability if b["count"]]
    text += [f"confidence above {b['least']:.2f}: {_bin(b)}" for b in bins]
    return text + (_calibration(report.path, report.calibration) if report.calibration else [])


def _calibration(path: str, c: dict[str, Any]) -> list[str]:
    """Returns the lines about a calibration, as the report has it."""
    what = "temperature of the mean" if c["kind"] == "temperature" else "factor of the variance"
    text = [
        f"{what}: {c['value']:.4g}{', the bound' if c['at_bound'] else ''}, fitted on "
        f"{plural(c['rows'], 'row')}; of the other {c['held_out']}, before and after:"
    ]
    pairs = [(name, *(c[when][name] for when in ("before", "after"))) for name in c["before"]]
    for name, before, after in pairs:
        if name == "intervals":
            text += [
                f"  {100 * b['level']:.0f}% intervals contain {100 * b['coverage']:.1f}%, "
                f"{100 * a['coverage']:.1f}% of the targets"
                for b, a in zip(before, after)
            ]
        elif name != "reliability":
            text.append(f"  {_row(name, 11, [before, after])}")
    if not c["improves"]:
        text.append("it does not improve the nll of the other rows: fit it on more rows, or do not use it")
    return [*text, f"wrote {path}, now {c['saved']}" if c["saved"] else "not recorded; --save does it"]


def _bin(b: dict[str, float | int]) -> str:
    return f"mean {b['confidence']:.3f}, accuracy {b['accuracy']:.3f} of {plural(int(b['count']), 'answer')}"


def _row(name: str, width: int, values: Sequence[float | None]) -> str:
    return " ".join([f"{name:<{width}}", *(f"{'-' if v is None else f'{v:.4g}':>11}" for v in values)])

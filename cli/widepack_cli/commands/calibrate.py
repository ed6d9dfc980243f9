"""`widepack calibrate`: measures the kernel times of this machine, by which calls are predicted."""

from __future__ import annotations

from pathlib import Path

import click

from ..shared.failures import Refusal
from ..shared.options import emit, example, json_option, stdout_kept
from ..shared.progress_bar import Progress


@click.command(
    epilog=example(
        "widepack calibrate                      # keeps the times in your cache",
        "widepack calibrate --threads 1 -o times.json",
    )
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads inside an op. Default: torch's number.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the times to this file, which WIDEPACK_KERNEL_TIMES may name. Default: your cache.",
)
@json_option
def command(threads: int | None, out: Path | None, as_json: bool) -> None:
    """Measure what kernels take on this machine.

    Plans and `widepack advise` predict calls by these times. Without them plans rest on those of a similar
    machine, which are a part of widepack, and `widepack advise` measures them each time. The kernels run at
    general sizes, which are those of no network. The times count for this processor, this version of torch
    and this number of threads. A machine with nothing else to do gives the best times. It takes about twenty
    seconds.
    """
    if out is not None and not out.absolute().parent.is_dir():
        raise Refusal(f"{out}: the folder {out.absolute().parent} does not exist; create it first")
    with stdout_kept(as_json), Progress() as progress:
        progress("load", 0, 1)
        import torch

        from widepack.kernel_times.calibration import measure
        from widepack.kernel_times.sources import keep, written

        if threads is not None:
            torch.set_num_threads(threads)
        profile = measure(progress=progress)
        if out is None:
            place = keep(profile)
        else:
            out.write_text(written(profile), encoding="utf-8")
            place = out
    facts = {
        "machine": profile.machine,
        "torch": profile.torch,
        "threads": profile.threads,
        "date": profile.date,
        "kinds": len(profile.products) + len(profile.others),
        "file": str(place),
    }
    if as_json:
        emit(facts)
        return
    for name, value in facts.items():
        click.echo(f"{name:<9}{value}")

"""`widepack append`: adds members to an artifact."""

from __future__ import annotations

from pathlib import Path

import click

from ..shared.member_paths import expand, in_order
from ..shared.options import ARTIFACT, example, json_option, model_options, sort_option, stdout_kept
from ..shared.progress_bar import Progress
from ..shared.revision import checkpoint_options, out_options, print_report


@click.command(
    epilog=example(
        "widepack append ens.wide fold8.pt fold9.pt",
        "widepack append ens.wide runs/new/*.pt --names a,b -o next.wide",
    )
)
@ARTIFACT
@click.argument("checkpoints", metavar="CKPT...", nargs=-1, required=True)
@click.option(
    "--names",
    metavar="A,B,...|FILE",
    help="The names of the new members. Default: the shortest parts in which the paths differ.",
)
@sort_option
@out_options
@model_options
@checkpoint_options
@json_option
def command(
    artifact: Path,
    checkpoints: tuple[str, ...],
    names: str | None,
    sort: str,
    out: Path | None,
    force: bool,
    max_shard_size: str | None,
    model: str | None,
    model_args: tuple[str, ...],
    key: str | None,
    trust_pickle: bool,
    ignore: tuple[str, ...],
    base: str | None,
    as_json: bool,
) -> None:
    """Add the checkpoints CKPT... to ARTIFACT after its present members.

    The code of your model is not needed: each checkpoint is checked against the artifact's weights and
    programs, and must have the shapes of one of its members. The programs contain the number of members, so
    they are lowered again with predicted plans, and plans that were measured for fewer members are left out.
    The answers of all members are verified again before one rename publishes the result.
    """
    with stdout_kept(as_json), Progress() as progress:
        import widepack
        from widepack.spec.config import parse_model_args

        report = widepack.append(
            artifact,
            in_order(expand(checkpoints), sort),
            names=names,
            out=out,
            force=force,
            max_shard_size=max_shard_size,
            key=key,
            trust_pickle=trust_pickle,
            ignore=ignore,
            base=base,
            model=model,
            model_args=parse_model_args(model_args) or None,
            progress=progress,
        )
    print_report(report, as_json)

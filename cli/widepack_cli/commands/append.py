"""`widepack append`: more members for an artifact."""

from __future__ import annotations

from pathlib import Path

import click

from .build import expand
from ..shared.options import ARTIFACT, example, json_option, model_options, stdout_kept
from ..shared.progress_bar import Progress
from ..shared.revision import checkpoint_options, out_options, tell


@click.command(
    epilog=example(
        "widepack append ens.wide fold8.pt fold9.pt",
        "widepack append ens.wide runs/new/*.pt --names a,b -o next.wide",
    )
)
@ARTIFACT
@click.argument("checkpoints", metavar="CKPT...", nargs=-1, required=True)
@click.option("--names", metavar="A,B,...|FILE", help="The newcomers' names. Without it: the shortest distinguishing parts of the paths.")
@out_options
@model_options
@checkpoint_options
@json_option
def command(
    artifact: Path,
    checkpoints: tuple[str, ...],
    names: str | None,
    out: Path | None,
    force: bool,
    max_shard_size: str | None,
    model: str | None,
    model_args: tuple[str, ...],
    key: str | None,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Add the checkpoints CKPT... to ARTIFACT, behind the members that are there.

    Your model's code is not needed: a checkpoint is held to the artifact's weights and programs, and has the shapes of one of its members. Programs are lowered again
    by rules of thumb, since the number of members stands in them; plans that were measured for fewer are left out. Every answer is proved again for all members
    before one rename publishes the result.
    """
    with stdout_kept(as_json), Progress() as progress:
        import widepack
        from widepack.spec.input_spec import parse_model_args

        report = widepack.append(
            artifact,
            expand(checkpoints),
            names=names,
            out=out,
            force=force,
            max_shard_size=max_shard_size,
            key=key,
            trust_pickle=trust_pickle,
            model=model,
            model_args=parse_model_args(model_args) or None,
            progress=progress,
        )
    tell(report, as_json)

"""`widepack extract`: writes the weights of one member to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, cast

import click

from widepack_bench.text import plural

from ..shared.failures import Failure
from ..shared.options import ARTIFACT, example


@click.command(
    epilog=example(
        "widepack extract ens.wide fold3",
        "widepack extract ens.wide 0 -o first.safetensors",
        "widepack extract ens.wide fold3 -o fold3.pt --force",
    )
)
@ARTIFACT
@click.argument("member")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="A .pt, .pth or .safetensors file. Default: MEMBER.safetensors in the current folder.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(artifact: Path, member: str, out: Path | None, force: bool) -> None:
    """Write the weights of MEMBER (a name, or a number from 0) of ARTIFACT to a state dict.

    The weights are bit for bit those of the checkpoint that the artifact was built from, under the same
    names. If the artifact was built with `--dtype`, they have that dtype. The hashes of the artifact's files
    are checked first.
    """
    from widepack.spec.names import number_in
    from widepack_artifacts.reader import Reader

    names = [m.name for m in Reader(artifact).manifest.members]
    name = names[number_in(names, member)]
    out = out or Path(f"{name.replace('/', '-')}.safetensors")
    if out.suffix not in (".pt", ".pth", ".safetensors"):
        raise click.BadParameter(f"{out} must end in .pt, .pth or .safetensors", param_hint="--out")
    import widepack
    from widepack.system.atomic_file import admit, whole

    admit(out, force)
    # Clones: the file must not share memory with the artifact, nor two names with each other.
    state = {
        k: v.detach().clone()
        for k, v in widepack.load(artifact, verify="hashes", prologue=False, warmup=False)
        .state_dict(name)
        .items()
    }
    try:
        with whole(out, force, out.suffix) as path:
            save(state, path)
    except OSError as e:
        raise Failure(
            f"{out}: cannot be written: {e.strerror or e}. No part of it remains; an earlier "
            "file is unchanged"
        ) from e
    click.echo(f"wrote {out}: {plural(len(state), 'tensor')} of member {name}")


def save(state: dict[str, Any], path: Path) -> None:
    """Writes a state dict in the format that the suffix names. Raises: OSError."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file({k: v.contiguous() for k, v in state.items()}, path)
        except SafetensorError as e:  # the system's message is only in its text
            raise OSError(str(e)) from e
    else:
        import torch

        from widepack.system.atomic_file import Sink

        with Sink(path) as file:
            torch.save(state, cast(IO[bytes], file))

"""Loads this process's part of an artifact: `widepack.distributed.load`."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from widepack_artifacts.reader import Reader

from ..errors import Unavailable
from ..inference.load import load as load_here
from ..inference.load import on_device
from ..system.gate import Gate
from .device_load import divided_members, opened_in_parts
from .rank_model import RankModel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from .device_load import LoadArguments


def load(
    path: str | PathLike[str],
    group: ProcessGroup | None = None,
    *,
    timeout: float = 300.0,
    device: str | torch.device | None = None,
    **options: Unpack[LoadArguments],
) -> RankModel:
    """Loads an artifact in the processes of a group: each loads a part of the members.

    The parts are adjacent members of about equal bytes of weights. Every process of the group calls this
    function, and after it makes the same calls in the same order. The path must name the same artifact in
    every process.

    Args:
        path: The folder that `widepack.build` wrote.
        group: The process group. Default: all processes. The model uses a new group of the same processes and
            backend.
        timeout: The seconds after which a call that waits for another process raises. A call waits while
            another rank binds a program or checks a swap, so do not make it too short.
        device: Where this process's members run. With the backend `nccl` it is a CUDA device, one for each
            process. Default: the CPU.
        **options: The options of `widepack.load`, except `weights` and `max_error`. `members` names the
            members of all ranks together.

    Returns:
        A `RankModel`.

    Raises:
        ArtifactError: As `widepack.load`.
        InputError: Another rank could not load its part, or loads another artifact or with other options.
        Unavailable: This torch has no torch.distributed.
        UsageError: torch.distributed is not initialized, an argument is not valid, or there are more
            processes than members.
        WidepackError: Another process ended, or did not answer within the timeout.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # in processes that torchrun starts
        >>> ens = widepack.distributed.load("ens.wide")
        >>> y = ens(x)  # on every rank: x [B, 8], y [N, B, 3]
    """
    if not torch.distributed.is_available():
        raise Unavailable("this torch was built without torch.distributed; install another build of torch")
    from .collectives import Ranks  # imports torch.distributed, which only this function needs

    where = on_device(device)
    ranks, gate = Ranks(group, timeout, where), Gate()

    def opening(reader: Reader) -> tuple[Any, Sequence[int], Sequence[range]]:
        """Opens this rank's part from the files of one digest."""
        chosen, parts = divided_members(reader, options, ranks.size, "processes")
        mine: LoadArguments = {**options, "members": [chosen[i] for i in parts[ranks.rank]]}
        mine["expect"] = reader.manifest.digest
        return load_here(path, device=where, gate=gate, **mine), chosen, parts

    here, chosen, parts = ranks.agreed(
        lambda: opened_in_parts(path, options, opening),
        lambda found: f"{found[0].manifest.digest} {found[1]}",
    )
    return RankModel(here, chosen, parts, ranks, gate)

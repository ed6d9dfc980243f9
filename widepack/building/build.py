"""Defines `widepack.build`, which fuses checkpoints into an artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.discovery import listed, places_of
from ..checkpoints.loading import patterns_of
from ..inference.model import RESERVED
from ..planning.request import StrategyRequest
from ..spec.config import parse_size
from ..spec.dropout import is_on, passes
from ..spec.dtypes import find_dtype
from ..spec.entries import entry_names
from ..spec.names import path_of
from ..spec.state import parse_states
from ..system.progress import Report
from ..tuning.tune import build_seconds, checked_seconds
from .captures import CallDescription, Specs
from .report import BuildReport
from .request import TARGETS, BuildRequest, batches_of, names_of, part_counts_of
from .stages import run_build
from .write import SHARD_BYTES


def build(
    checkpoints: Sequence[str | Path],
    out: str | Path,
    *,
    model: str | Callable[..., nn.Module] | None = None,
    model_args: Mapping[str, Any] | None = None,
    inputs: Specs | None = None,
    sample: Sequence[Any] | Mapping[str, Any] | None = None,
    sample_kwargs: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    entries: Sequence[str] | None = None,
    state: Sequence[str] = (),
    names: str | Path | Sequence[str] | None = None,
    key: str | None = None,
    dtype: str | torch.dtype | None = None,
    trust_pickle: bool = False,
    ignore: str | Sequence[str] = (),
    skip_bad: bool = False,
    strategy: str | Sequence[str] = "auto",
    targets: Sequence[str] = TARGETS,
    share: str = "auto",
    pt2: bool = True,
    max_shard_size: int | str = SHARD_BYTES,
    shards: int | Sequence[int] | None = None,
    force: bool = False,
    dry_run: bool = False,
    budget: float | None = None,
    tune: bool | Sequence[int] = False,
    n: int | None = None,
    dropout: str = "off",
    base: str | Path | None = None,
    unmerge: bool = False,
    tolerance: float | None = None,
    features: Mapping[str, str | Path | Sequence[str]] | str | Path | Sequence[str] | None = None,
    progress: Report | None = None,
) -> BuildReport:
    """Fuses N checkpoints of one architecture into an artifact and verifies it.

    The build makes two comparisons: each member's own module against its program, and every wide program
    against the members' float64 answers. The artifact is published only if both pass; otherwise `out` is
    unchanged.

    Args:
        checkpoints: The members: files of `torch.save`, safetensors or `torch.export`, indexes of shards, or
            folders with one of these. With `base` also folders of LoRA adapters as PEFT writes them.
        out: The folder to write, for example `"ens.wide"`.
        model: The factory of one member: `"pkg.mod:factory"`, `"file.py:factory"`, a callable, or `"hf"`
            (transformers, by the config.json beside each checkpoint). A factory with a parameter
            `state_dict` can build heads of different sizes. Default: the checkpoints are torch.export
            programs or pickled modules.
        model_args: Keyword arguments of the factory.
        inputs: Input specs such as `["x=float32[B,3,32,32]"]`; letters are dynamic dims. With several
            entries, a spec `"encode:x=float32[B,3]"` is for one entry, or give `{entry: specs}`.
        sample: Positional inputs of one call, instead of `inputs`. With several entries: `{entry: inputs}`.
        sample_kwargs: Keyword inputs of one call. With several entries: `{entry: inputs}`.
        dynamic: The dynamic axes of the sample, `{name: {axis: "B"}}`. Default: axis 0 is `"B"`. One letter
            with two sizes in the sample becomes two dims. With several entries: `{entry: axes}`.
        entries: The methods of the module that become programs over the same weights. Default: `forward`.
        state: Values that the caller carries from call to call, one for each member: a buffer that the member
            changes (`"cache"`), or an input with the output that is its new value (`"h=h_new"`).
        names: The names of the members: a list, a text `"A,B"`, or a file with one name on each line.
            Default: the parts of the paths that differ.
        key: Where the state dict is in each file, for example `"ema"`. Default: one of the usual places.
            A `*` names several members in one file: `"*"` every state dict of a list or dict, `"models.*"`
            those under numbered names, `"[*]"` the slices of stacked weights `[N, ...]`.
        dtype: The dtype to convert all floating weights to, for example `"bfloat16"`. Default: no conversion.
        trust_pickle: Whether to run the code that pickled files name.
        ignore: Patterns of names in the checkpoints that are not the model's and are left out, for example
            `"criterion.*"`. The artifact keeps them: `swap`, `update` and `append` leave these names out too.
            A pattern of extra state (`"*_extra_state"`) leaves it out of the artifact.
        skip_bad: Whether to build without the checkpoints that cannot be read or are of another model.
        strategy: `"auto"`, `"wide"`, `"loop"`, or a list of strategies of ops, in order of preference.
        targets: The device kinds to lower programs for: `"cpu"`, `"cuda"`.
        share: `"auto"` stores a weight once if it is equal in all members; `"none"` never does.
        pt2: Whether to write torch.export programs too.
        max_shard_size: The largest size of a weights file, in bytes or as `"5GB"`. One weight is never
            divided.
        shards: The number of parts in which the artifact will be loaded, for example the number of devices of
            `load(device=[...])` or of processes of `distributed.load`. The build also writes and verifies the
            programs of each part, so a load of a part lowers nothing. Several numbers: a list. Default: none.
        force: Whether to replace an artifact at `out`.
        dry_run: Whether to stop after lowering. Nothing is verified or written.
        budget: The most processor seconds in which plans are measured here after the build. Plans that are
            faster than the predicted ones are stored in the artifact. 0 only predicts. Default: 20, or the
            environment variable WIDEPACK_BUDGET. Nothing is measured with `strategy`, `tune`, `dry_run`, and
            for entries that draw random numbers.
        tune: Whether to measure the plans on this machine after the build and store them in the artifact, as
            `widepack.tune` does. A list names the batch sizes to measure at.
        n: The number of members that are stochastic passes of one checkpoint; needs `dropout="on"`.
        dropout: `"on"` keeps dropout on in eval mode: each member and call draws its own. Programs are then
            verified without their draws, run on the backend `eager`, and are not tuned.
        base: The checkpoint of the model that adapters were trained on. The artifact stores its weights once,
            and for each member the low-rank factors of the adapter.
        unmerge: Whether to look for a common base and low-rank differences in the members' weights, for
            checkpoints that adapters were merged into. With `base`, the differences from it; without, the
            base is one of the members, or is computed from three members or more. Weights without such
            differences are stored for each member.
        tolerance: Takes approximate factors for weights without exact ones. On the calls of the
            verification, the answers differ from the checkpoints' by at most this part of what the fine-tunes
            change, for example 0.05. The build measures and records it for each member and output. Needs
            `unmerge` and `base`. Default: all factors are exact.
        features: The names of the numbers of a row of an input, in their order: `{"x": ["age", "height"]}`, a
            text `"a,b"` or `"f0..f63"`, or the path of a table with these columns; without `{}` of the only
            input. The artifact keeps them, and `predict`, `evaluate` and `select` read columns by them.
        progress: A function that is called with `(stage, done, total)`.

    Returns:
        A `BuildReport`.

    Raises:
        UsageError: Arguments are wrong or exclude each other.
        CheckpointError: Checkpoints cannot be read. The error lists all of them.
        MemberMismatch: Checkpoints are not of one architecture. The error lists all differences.
        CaptureError: A member cannot be captured.
        LoweringError: An op cannot run for all members.
        VerificationError: A program does not give the members' answers.
        ArtifactError: The artifact cannot be written, or `out` exists and `force` is not given.

    Example:
        >>> report = widepack.build(
        ...     ["a.pt", "b.pt", "c.pt"], "ens.wide", model="net.py:make", inputs=["x=float32[B,3,32,32]"]
        ... )
        >>> ens = widepack.load(report.path)
    """
    strategies = StrategyRequest.parse(strategy)
    path_of(out, "out", "the folder to write")
    paths = tuple(listed(checkpoints))
    dropout_on = is_on(dropout)
    places = tuple(places_of(paths, key, trust_pickle))
    count = passes(n, dropout_on, len(places), tune is not False)
    methods = entry_names(entries, RESERVED)
    return run_build(
        BuildRequest(
            places=places,
            names=names_of(names, [p.name for p in places], count, n is not None),
            out=out,
            model=model,
            model_args=model_args,
            calls=CallDescription(inputs, sample, sample_kwargs, dynamic),
            entries=methods,
            states=parse_states(state, methods),
            key=key,
            dtype=find_dtype(dtype),
            trust_pickle=trust_pickle,
            ignore=patterns_of(ignore),
            skip_bad=skip_bad,
            strategies=strategies,
            targets=tuple(targets),
            share=share,
            pt2=pt2,
            shard_bytes=parse_size(max_shard_size),
            part_counts=part_counts_of(shards),
            force=force,
            dry_run=dry_run,
            budget=build_seconds() if budget is None else checked_seconds(budget),
            tune_batches=batches_of(tune),
            dropout=dropout_on,
            one_checkpoint=n is not None,
            base=None if base is None else listed([base])[0],
            unmerge=unmerge,
            tolerance=tolerance,
            features=features,
            progress=progress,
        )
    )

"""`widepack verify`: checks the files and the answers of an artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from widepack_artifacts.errors import WidepackError
from widepack_artifacts.manifest import Manifest
from widepack_bench.text import plural, size

from ..shared.options import (
    ARTIFACT,
    emit,
    entry_named,
    entry_option,
    example,
    json_option,
    model_options,
    sort_option,
    stdout_kept,
)

BATCHES = (1, 2, 5)


@click.command(
    epilog=example(
        "widepack verify ens.wide",
        "widepack verify ens.wide ckpts/*.pt --model net.py:make",
        "widepack verify ens.wide --device cuda --json",
    )
)
@ARTIFACT
@click.argument("checkpoints", metavar="[CKPT]...", nargs=-1)
@model_options
@sort_option
@entry_option
@click.option(
    "--key",
    help="The key of the state dict (such as ema.model) in a checkpoint that contains other values, too.",
)
@click.option(
    "--trust-pickle",
    is_flag=True,
    help="Load the checkpoints with pickle, which can run any code that they contain. Only for files that "
    "you trust.",
)
@click.option(
    "--device", default="cpu", show_default=True, help="The device on which the answers are checked."
)
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="Check the answers of the artifact in another dtype: bf16, fp16, fp32.",
)
@json_option
def command(
    artifact: Path,
    checkpoints: tuple[str, ...],
    model: str | None,
    model_args: tuple[str, ...],
    sort: str,
    entry: str,
    key: str | None,
    trust_pickle: bool,
    device: str,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Check ARTIFACT: its manifest, the size and hash of every file, and its answers on the probe.

    With checkpoints, also check that the artifact has their weights, bit for bit. With --model, also compare
    its answers with those of your modules. The exit code is 1 at the first check that fails.
    """
    if dtype and model is not None:
        raise click.UsageError(
            "--dtype cannot be used with --model: your modules have the dtype of the build; leave out "
            "one of the two"
        )
    if sort == "natural":
        from .build import expand, in_order

        checkpoints = tuple(in_order(expand(checkpoints), sort))
    passed: list[dict[str, Any]] = []
    document = {"path": str(artifact), "device": device, "ok": False, "checks": passed}
    try:
        with stdout_kept(as_json):
            for name, found in checks(
                artifact, checkpoints, model, model_args, key, trust_pickle, device, entry, dtype
            ):
                passed.append({"check": name, "found": found})
                if not as_json:
                    click.echo(f"{name:<12} ok  {found}")
        document["ok"] = True
    except WidepackError as error:
        document["error"] = str(error)
        raise
    finally:
        if as_json:
            emit(document)


def checks(
    artifact: Path,
    checkpoints: tuple[str, ...],
    model: str | None,
    model_args: tuple[str, ...],
    key: str | None,
    trust: bool,
    device: str,
    entry: str = "",
    dtype: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields name and result of each passed check. Raises: WidepackError at the first check that fails."""
    from widepack_artifacts.reader import Reader, opened

    reader, _ = opened(artifact, Reader.check_sizes)
    manifest = reader.manifest
    entries = [entry_named(manifest.entries, entry, "")] if entry else list(manifest.entries)
    which = (
        ""
        if entries == ["forward"]
        else f", {'entry' if len(entries) == 1 else 'entries'} {', '.join(entries)}"
    )
    yield "digest", manifest.digest
    total = sum(f.bytes for f in manifest.files.values())
    yield "sizes", f"{plural(len(manifest.files), 'file')}, {size(total)}"
    try:
        reader.check_hashes()
    except WidepackError:
        if not reader.replaced():
            raise
        manifest = opened(artifact, Reader.check_hashes)[0].manifest
        yield "digest", f"{manifest.digest}, published while the previous manifest was read"
    yield "hashes", f"{plural(len(manifest.files), 'file')}, SHA-256"
    import widepack

    probed = "sizes" if manifest.probe else "off"
    ens = widepack.load(artifact, device=device, dtype=dtype, verify=probed, warmup=False, memory="most")
    if manifest.probe:
        for name in entries:
            ens.entry(name).probe()
        yield (
            "probe",
            f"{plural(len(ens), 'member')} on "
            f"{device}{f' in {dtype}' if dtype else ''}{which}, patterns shared and each, "
            "against the float64 answers recorded at build",
        )
        parts = parts_of(manifest) if dtype is None else []
        for part in parts:
            some = widepack.load(
                artifact, device=device, members=list(part), expect=ens.manifest.digest, warmup=False
            )
            for name in entries:
                some.entry(name).probe()
        if parts:
            yield (
                "parts",
                f"{plural(len(parts), 'part')} of the members on {device}, against the same answers",
            )
    yield from _factors(ens)
    if checkpoints:
        yield "checkpoints", _same_weights(ens, checkpoints, key, trust)
    if model is not None:
        from widepack.building.factories import find_factory
        from widepack.spec.config import parse_model_args

        factory = find_factory(
            model, parse_model_args(model_args), checkpoints or [m.source for m in manifest.members]
        )
        modules = _own_modules(ens, factory, device)
        for name in entries:
            yield (
                "answers",
                f"{_same_answers(ens, modules, name, device)}{f', entry {name}' if which else ''}",
            )


def _factors(ens: Any) -> Iterator[tuple[str, str]]:
    """Computes every member's weights that are stored as factors. Raises: ArtifactError."""
    factored = ens.manifest.factored
    if not factored.weights:
        return
    for member in ens.members:
        ens.state_dict(member)
    exact = ", bit for bit" if factored.corrections else ""
    count = f"{plural(len(factored.weights), 'weight')} of {plural(len(ens), 'member')}"
    yield "factors", f"{count} computed from factors{exact}"


def parts_of(manifest: Manifest) -> list[range]:
    """Returns the parts of the members that have programs of their own, each once."""
    rows = (w.part for entry in manifest.entries.values() for w in entry.wide)
    return list(dict.fromkeys(part for part in rows if part is not None))


def _same_weights(ens: Any, checkpoints: tuple[str, ...], key: str | None, trust: bool) -> str:
    """Compares the members' weights with the checkpoints, in their order.

    A tied weight has one of its names in a checkpoint. Floating weights that the build converted are
    converted here too.

    Raises:
        VerificationError: A weight differs; the message lists up to eight.
    """
    from widepack.checkpoints.differences import bit_equal, under_model_names
    from widepack.checkpoints.discovery import open_all
    from widepack.errors import VerificationError
    from widepack.fleet.adapter_files import is_adapter

    from .build import expand

    paths = expand(checkpoints)
    if adapters := [path for path in paths if is_adapter(path)]:
        raise VerificationError(
            f"checkpoints: {adapters[0]} is a LoRA adapter, and the weights are compared with whole"
            " checkpoints; merge it into its base, or leave the checkpoints out"
        )
    opened = open_all(paths, key, trust)
    if len(opened) != len(ens):
        raise VerificationError(
            f"checkpoints: {len(opened)} were given, the artifact has {len(ens)} members: "
            f"{', '.join(ens.members[:20])}"
        )
    tied = [{w.name, *w.aliases} for w in ens.manifest.member_weights if w.aliases]
    wrong: list[str] = []
    converted: set[str] = set()
    count = 0
    for name, checkpoint in zip(ens.members, opened, strict=True):
        state = ens.state_dict(name)
        weights = under_model_names(checkpoint, state).state_dict()
        count += len(weights)
        missing = sorted(
            k
            for k in set(state) - set(weights)
            if not any(k in names and names & set(weights) for names in tied)
        )
        wrong += [f"member {name}: {k} is not in {checkpoint.path}" for k in missing]
        wrong += [
            f"member {name}: {k} of {checkpoint.path} is not in the artifact"
            for k in sorted(set(weights) - set(state))
        ]
        for k in sorted(set(weights) & set(state)):
            theirs, mine = weights[k], state[k]
            if theirs.dtype != mine.dtype and theirs.is_floating_point() and mine.is_floating_point():
                theirs = theirs.to(mine.dtype)
                converted.add(str(mine.dtype).removeprefix("torch."))
            if not bit_equal(mine, theirs):
                wrong.append(f"member {name}: {k} differs from {checkpoint.path}")
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise VerificationError(
            f"checkpoints: {'; '.join(wrong[:8])}{more}. Give the checkpoints in the order of the members"
        )
    to = f", converted to {', '.join(sorted(converted))}" if converted else ""
    return f"{plural(count, 'tensor')} of {plural(len(opened), 'checkpoint')}, bit for bit{to}"


def _own_modules(ens: Any, factory: Callable[..., Any], device: str) -> list[Any]:
    from widepack_bench.baselines.members import own_module

    return [own_module(factory, ens.state_dict(name), name).to(device) for name in ens.members]


def _same_answers(ens: Any, modules: list[Any], name: str, device: str) -> str:
    """Compares an entry's answers with the user's modules, for both patterns. Raises: VerificationError."""
    import torch

    from widepack.errors import VerificationError
    from widepack_bench.baselines.members import called
    from widepack_bench.baselines.table import difference, loop, padding_kept
    from widepack_bench.errors import BenchError
    from widepack_bench.measure.inputs import make
    from widepack_bench.suite.stateful_steps import steps

    entry, run = ens.manifest.entries[name], ens.entry(name)
    calls = [called(m, name) for m in modules]
    compared = []
    carries = bool(entry.state)
    with torch.inference_mode(), padding_kept():
        for batch in BATCHES:
            for each in (False, True):
                try:
                    if carries:
                        wrong = steps(run, modules, batch, each, device)
                    else:
                        args, kwargs, _ = make(entry, batch, members=len(ens) if each else 0, device=device)
                        wrong = difference(
                            (run.each if each else run)(*args, **kwargs), loop(calls, each)(*args, **kwargs)
                        )
                except BenchError:  # the model does not take this batch size
                    continue
                if wrong:
                    raise VerificationError(
                        f"answers: {name}, batch {batch}, {'each' if each else 'shared'}: the answers "
                        f"of the artifact differ from those of your modules: {wrong}"
                    )
                compared.append(batch)
    if not compared:
        raise VerificationError(
            f"answers: {name}: no inputs could be made at batch {', '.join(map(str, BATCHES))}"
        )
    return (
        f"as your modules{', two steps in a row' if carries else ''}, patterns shared and each, batch "
        f"{', '.join(map(str, dict.fromkeys(compared)))}"
    )

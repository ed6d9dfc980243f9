"""`widepack verify`: checks the files and the answers of an artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    weights_options,
)
from ..shared.threads import use_free_cores

BATCHES = (1, 2, 5)


@click.command(
    epilog=example(
        "widepack verify ens.wide",
        "widepack verify ens.wide ckpts/*.pt --model net.py:make",
        "widepack verify fleet.wide lora/* --base base.pt",
        "widepack verify ens.wide --device cuda --json",
        "widepack verify ens.wide --weights int8 --max-error 0.05",
    )
)
@ARTIFACT
@click.argument("checkpoints", metavar="[CKPT]...", nargs=-1)
@model_options
@click.option(
    "--base",
    metavar="CKPT",
    help="The checkpoint of the model that the adapters among CKPT change. Default: the artifact's base.",
)
@sort_option
@entry_option
@click.option(
    "--key",
    help="The key of the state dict (such as ema.model) in a checkpoint that contains other values, too. "
    "'*' in it names several members of a file: 'model_*', '*', '[*]'.",
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
@weights_options
@json_option
def command(
    artifact: Path,
    checkpoints: tuple[str, ...],
    model: str | None,
    model_args: tuple[str, ...],
    base: str | None,
    sort: str,
    entry: str,
    key: str | None,
    trust_pickle: bool,
    device: str,
    dtype: str | None,
    weights: str | None,
    max_error: float | None,
    as_json: bool,
) -> None:
    """Check ARTIFACT: its manifest, the size and hash of every file, and its answers on the probe.

    With checkpoints, also check that the artifact has their weights, bit for bit. A checkpoint may be the
    folder of a LoRA adapter. With --model, also compare the answers with those of your modules. The exit code
    is 1 at the first check that fails.
    """
    if dtype and model is not None:
        raise click.UsageError(
            "--dtype cannot be used with --model: your modules have the dtype of the build; leave out "
            "one of the two"
        )
    if weights and model is not None:
        raise click.UsageError(
            "--weights cannot be used with --model: the answers of int8 weights are not those of your "
            "modules; leave out one of the two"
        )
    if sort == "natural":
        from ..shared.member_paths import expand, in_order

        checkpoints = tuple(in_order(expand(checkpoints), sort))
    passed: list[dict[str, Any]] = []
    document = {"path": str(artifact), "device": device, "ok": False, "checks": passed}
    try:
        with stdout_kept(as_json):
            for name, found in checks(
                artifact,
                checkpoints,
                model,
                model_args,
                key,
                trust_pickle,
                device,
                entry,
                dtype,
                base,
                weights,
                max_error,
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
    base: str | None = None,
    weights: str | None = None,
    max_error: float | None = None,
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

    use_free_cores()
    probed = "sizes" if manifest.probe or weights else "off"  # int8 weights say by themselves what is missing
    ens = widepack.load(
        artifact,
        device=device,
        dtype=dtype,
        verify=probed,
        warmup=weights is not None,
        memory="most",
        weights=weights,
        max_error=max_error,
    )
    if manifest.probe:
        for name in entries:
            ens.entry(name).probe()
        yield (
            "probe",
            f"{plural(len(ens), 'member')} on "
            f"{device}{f' in {dtype}' if dtype else ''}{which}, patterns shared and each, "
            "against the float64 answers recorded at build",
        )
        if errors := ens.weight_errors:
            yield "weights", f"{weights}; {max(errors, key=lambda row: row.largest)}"
        if dtype is None:
            yield from _parts(artifact, ens.manifest, entries, device)
    yield from _factors(ens)
    factory = None if model is None else _factory(model, model_args, checkpoints, base, manifest)
    if checkpoints or base is not None:
        from ..shared.given_members import given_members, same_weights

        given = given_members(artifact, ens, checkpoints, base, key, trust, factory)
        yield "checkpoints", same_weights(ens, given)
    if factory is not None:
        modules = _own_modules(ens, factory, device)
        for name in entries:
            yield (
                "answers",
                f"{_same_answers(ens, modules, name, device)}{f', entry {name}' if which else ''}",
            )


def _parts(
    artifact: Path, manifest: Manifest, entries: Sequence[str], device: str
) -> Iterator[tuple[str, str]]:
    """Runs the probe of each part of the members that has programs of its own. Raises: ArtifactError."""
    import widepack

    parts = parts_of(manifest)
    for part in parts:
        some = widepack.load(
            artifact, device=device, members=list(part), expect=manifest.digest, warmup=False
        )
        for name in entries:
            some.entry(name).probe()
    if parts:
        yield "parts", f"{plural(len(parts), 'part')} of the members on {device}, against the same answers"


def _factors(ens: Any) -> Iterator[tuple[str, str]]:
    """Computes every member's weights that are stored as factors. Raises: ArtifactError."""
    factored = ens.manifest.factored
    if not factored.weights:
        return
    for member in ens.members:
        ens.stored_state(member)
    exact = ", bit for bit" if factored.corrections else ""
    count = f"{plural(len(factored.weights), 'weight')} of {plural(len(ens), 'member')}"
    yield "factors", f"{count} computed from factors{exact}"


def parts_of(manifest: Manifest) -> list[range]:
    """Returns the parts of the members that have programs of their own, each once."""
    rows = (w.part for entry in manifest.entries.values() for w in entry.wide)
    return list(dict.fromkeys(part for part in rows if part is not None))


def _factory(
    model: str, args: tuple[str, ...], checkpoints: Sequence[str], base: str | None, manifest: Manifest
) -> Callable[..., Any]:
    from widepack.checkpoints.named_factory import find_factory
    from widepack.spec.config import parse_model_args

    beside = _with_configs(checkpoints or [m.source for m in manifest.members], base, manifest)
    return find_factory(model, parse_model_args(args), beside)


def _with_configs(paths: Sequence[str], base: str | None, manifest: Manifest) -> list[str]:
    """Returns the paths beside which `--model hf` finds config.json: in the place of adapters, their base."""
    from widepack.fleet.adapter import is_adapter

    record = manifest.provenance.get("base")
    known = base or (record.get("source") if isinstance(record, dict) else None)
    if isinstance(known, str) and any(is_adapter(path) for path in paths):
        return [known, *(path for path in paths if not is_adapter(path))]
    return list(paths)


def _own_modules(ens: Any, factory: Callable[..., Any], device: str) -> list[Any]:
    from widepack_bench.baselines.members import own_module

    return [own_module(factory, ens.state_dict(name), name).to(device) for name in ens.members]


def _same_answers(ens: Any, modules: list[Any], name: str, device: str) -> str:
    """Compares an entry's answers with the user's modules, for both patterns. Raises: VerificationError."""
    import torch

    from widepack.errors import VerificationError
    from widepack.ir.torch_internals import without_fast_path
    from widepack_bench.baselines.derivatives import for_inference
    from widepack_bench.baselines.members import called
    from widepack_bench.baselines.table import difference, loop
    from widepack_bench.errors import BenchError
    from widepack_bench.measure.inputs import make
    from widepack_bench.suite.stateful_steps import steps

    entry, run = ens.manifest.entries[name], ens.entry(name)
    calls = [called(m, name) for m in modules]
    compared: list[int] = []
    carries = bool(entry.state)
    with torch.inference_mode(), without_fast_path():
        for batch in BATCHES:
            for each in (False, True):
                try:
                    if carries:
                        wrong = steps(run, modules, batch, each, device)
                    else:
                        if not compared:
                            example, named, _ = make(entry, batch, members=0, device=device)
                            calls = for_inference(calls, example, named)
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

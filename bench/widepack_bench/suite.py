"""`bench(artifact)` and `compare(ens, modules)`: a wide model beside its members, batch by batch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from widepack.entries import FORWARD, method_of
from widepack.errors import UsageError
from widepack_artifacts.manifest import Entry, Manifest

from . import noise
from .baselines import BASELINES, Run, difference, loop, padding_kept
from .errors import BenchError
from .flat import flat_members
from .inputs import make
from .report import Report, Row, environment

if TYPE_CHECKING:
    from widepack import WideModel

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
Progress = Callable[[str, int, int], None]

FLAT = "the artifact's member programs (give the model's factory to run your own modules)"
OWN = "your own modules"
PATTERNS = ("shared", "each")


def bench(
    model: str | os.PathLike[str] | WideModel,
    *,
    device: str = "cpu",
    batches: Sequence[int] = (1, 8, 32),
    baselines: Sequence[str] = tuple(BASELINES),
    budget_s: float = 20.0,
    threads: int | None = None,
    pattern: str = "shared",
    modules: Sequence[nn.Module] | None = None,
    factory: Callable[[Mapping[str, Any]], nn.Module] | None = None,
    entry: str = "",
    pin: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Time an artifact, or a loaded model, against the baselines.

    device: where an artifact is loaded and everything runs. budget_s: seconds of measuring a batch, compilation aside. threads: threads
    inside an op, torch's own number where None. pattern: `shared` (every member sees the same inputs) or `each`. modules: the user's own modules
    in the members' order, or factory: makes one from a member's state dict; without either the baselines run `ens.member(i)`. entry: the method to call,
    forward or the artifact's first without it.
    Raises: BenchError where the wide model's answers are not the loop's; UsageError for an unknown baseline or pattern; what `widepack.load` raises.
    """
    import widepack

    check(batches, baselines, pattern)
    with noise.quiet(threads, pin):
        if isinstance(model, widepack.WideModel):
            ens, name = model, "model"
        else:
            ens, name = widepack.load(model, device=device), os.fspath(model)
        if modules is None and factory is not None:
            modules = [own_module(factory, ens.state_dict(i), str(m)) for i, m in enumerate(ens.members)]
        return compare(
            ens, modules, batches, baselines=baselines, budget_s=budget_s, pattern=pattern, entry=entry, device=device, name=name, progress=progress
        )


def compare(
    ens: Any,
    modules: Sequence[nn.Module] | None = None,
    batches: Sequence[int] = (1, 8, 32),
    *,
    baselines: Sequence[str] = tuple(BASELINES),
    budget_s: float = 20.0,
    pattern: str = "shared",
    inputs: Inputs | None = None,
    entry: str = "",
    device: str = "cpu",
    name: str = "model",
    progress: Progress | None = None,
) -> Report:
    """Time a loaded model against its members in `modules`, in their order (None: `ens.member(i)`).

    inputs: batch -> (positional, keyword) inputs, stacked `[N, ...]` for the pattern `each`; made from the manifest where None. The rest is as
    in `bench`.
    Raises: BenchError where an answer of `ens` is not the loop's, or `modules` are not as many as the members; UsageError as `bench`.
    """
    check(batches, baselines, pattern)
    own = OWN if modules is not None else FLAT
    manifest: Manifest | None = getattr(ens, "manifest", None)
    entry = entry or (manifest.entry if manifest else FORWARD)
    if manifest and entry not in manifest.entries:
        raise UsageError(f"there is no entry {entry!r}; the entries are {', '.join(manifest.entries)}")
    described = manifest.entries[entry] if manifest else None
    carries = described is not None and bool(described.state)
    if described is not None and carries and modules is not None:
        raise UsageError(
            f"{entry} carries state ({', '.join(described.states)}), and your own modules go on from call to call: "
            f"leave the model out, and the baselines run the artifact's member programs, every call from the same state"
        )
    ens = ens if entry == FORWARD and not carries else ens.entry(entry)
    count = len(ens if modules is None else modules)
    if count != len(ens):
        raise BenchError(f"{count} modules were given to compare with, and the wide model has {len(ens)} members")
    each = pattern == "each"
    rows: list[Row] = []
    refused: dict[int, str] = {}

    def contest(sizes: Mapping[str, int]) -> _Contest:
        state = ens.state(**sizes) if carries else None
        made = [called(m, entry) for m in modules] if modules is not None else flat_members(ens, state)
        members = [m.to(device).eval() for m in made]
        runs, unmade = _made(members, baselines, each)
        sync = torch.cuda.synchronize if device.startswith("cuda") else None
        ours = ens.each if each else ens
        return _Contest(functools.partial(ours, state=state) if carries else ours, loop(members, each), runs, unmade, budget_s, sync)

    with torch.inference_mode():
        held = None if carries else contest({})
        for done, batch in enumerate(batches):
            if progress:
                progress(f"batch {batch}", done, len(batches))
            try:
                args, kwargs, sizes = _inputs(described, inputs, batch, count if each else 0, device)
            except BenchError as refusal:
                refused[batch] = str(refusal)
                continue
            rows.append((held or contest(sizes)).row(batch, args, kwargs, sizes))
            if progress:
                progress(f"batch {batch}", done + 1, len(batches))
    return Report(name, count, pattern, own, tuple(rows), refused, environment(device, torch.get_num_threads()), entry)


def check(batches: Sequence[int], baselines: Sequence[str], pattern: str) -> None:
    """Refuse what cannot be meant. Raises: UsageError naming the known ones."""
    unknown = [b for b in baselines if b not in BASELINES]
    if unknown or not baselines:
        raise UsageError(f"unknown baseline {', '.join(map(repr, unknown)) or '(none given)'}; known: {', '.join(BASELINES)}")
    if pattern not in PATTERNS:
        raise UsageError(f"unknown pattern {pattern!r}; known: {', '.join(PATTERNS)}")
    if not batches or any(b < 1 for b in batches):
        raise UsageError(f"batches are whole numbers from 1, got {', '.join(map(str, batches)) or 'none'}")


def own_module(factory: Callable[[Mapping[str, Any]], nn.Module], state: Mapping[str, Any], member: str) -> nn.Module:
    """A module of the user's with a member's weights, in the dtype that they were built in. Raises: BenchError where its parameters are not the member's."""
    module = factory(state).eval()
    wanted = module.state_dict()
    missing = sorted(set(wanted) - set(state))
    unequal = sorted(k for k in set(wanted) & set(state) if wanted[k].shape != state[k].shape)
    if missing or unequal:
        what = f"has no {', '.join(missing[:5])}" if missing else f"has other shapes in {', '.join(unequal[:5])}"
        raise BenchError(f"member {member}: the artifact {what}, which the given model needs; is it the model that the artifact was built from?")
    floating = {state[k].dtype for k in wanted if state[k].is_floating_point()}
    if len(floating) == 1 and any(w.is_floating_point() and w.dtype not in floating for w in wanted.values()):
        module = module.to(*floating)  # the build was asked for another dtype than the factory's
    module.load_state_dict({k: state[k] for k in wanted})
    return module


def _made(members: Sequence[nn.Module], names: Sequence[str], each: bool) -> tuple[dict[str, Run], dict[str, str]]:
    """The baselines that can be made, and why the others cannot."""
    runs: dict[str, Run] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            runs[name] = BASELINES[name](members, each)
        except Exception as error:  # noqa: BLE001  # torch raises whatever it likes; a baseline that cannot be made is a result
            skipped[name] = _reason(error)
    return runs, skipped


class Method(nn.Module):
    """A module whose forward is another module's method."""

    def __init__(self, member: nn.Module, entry: str) -> None:
        super().__init__()
        self.member = member
        self.entry = entry

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.member, self.entry)(*args, **kwargs)


def called(module: nn.Module, entry: str) -> nn.Module:
    """A module that is called as the module's method is. Raises: UsageError where it has none of this name."""
    method_of(module, entry)
    return module if entry == FORWARD else Method(module, entry)


def _inputs(
    entry: Entry | None, inputs: Inputs | None, batch: int, members: int, device: str
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]:
    if inputs is None:
        assert entry is not None  # only a loaded model has inputs made for it
        return make(entry, batch, members=members, device=device)
    args, kwargs = inputs(batch)
    return args, kwargs, {"B": batch}


@dataclass(frozen=True, slots=True)
class _Contest:
    """What stays the same from batch to batch: ours, the modules, the baselines made of them."""

    ours: Run
    loop: Run
    runs: Mapping[str, Run]
    skipped: Mapping[str, str]
    budget_s: float
    sync: noise.Call | None

    def row(self, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: dict[str, int]) -> Row:
        """Compare answers, then time. Raises: BenchError where the wide model's answers are not the loop's."""
        with padding_kept():
            expected = self.loop(*args, **kwargs)
            wrong = difference(self.ours(*args, **kwargs), expected)
        if wrong:
            raise BenchError(
                f"batch {batch}: the wide model does not give the members' answers, so its time means nothing: {wrong}. `widepack verify` says more"
            )
        skipped = dict(self.skipped)
        calls: dict[str, noise.Call] = {}
        for name, run in self.runs.items():
            wrong = _wrong(run, args, kwargs, expected)
            if wrong:
                skipped[name] = wrong
            else:
                calls[name] = _bound(run, args, kwargs)
        if not calls:
            raise BenchError(f"batch {batch}: no baseline runs: {'; '.join(f'{k}: {v}' for k, v in skipped.items())}")
        race = noise.race(_bound(self.ours, args, kwargs), calls, budget_s=self.budget_s, sync=self.sync)
        return Row.of(batch, sizes, race, skipped)


def _wrong(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any) -> str:
    """Why a baseline cannot be timed here; empty where it can."""
    try:
        with padding_kept():
            wrong = difference(run(*args, **kwargs), expected)
        run(*args, **kwargs)  # as it will be timed: what is compiled for that is compiled now
    except Exception as error:  # noqa: BLE001  # compilers fail in their own ways, and that is a result
        return _reason(error)
    return wrong and f"its answers are not the loop's: {wrong}"


def _bound(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> noise.Call:
    """The call that is timed, with as little as possible around it."""
    if len(args) == 1 and not kwargs:
        (only,) = args
        return lambda: run(only)
    return lambda: run(*args, **kwargs)


def _reason(error: Exception) -> str:
    """The first line of an error that says something, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__

"""`bench(artifact)` and `compare(ens, modules)`: a wide model beside its members, batch by batch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from widepack.spec.dtypes import find_dtype
from widepack.spec.entries import FORWARD, PATTERNS, method_of
from widepack.errors import UsageError, WidepackError
from widepack_artifacts.manifest import Entry, Manifest

from ..measure import race as noise
from ..baselines.table import BASELINES, Run, difference, loop, padding_kept
from ..baselines.compiled import at_most, compiler_settings
from ..errors import BenchError
from ..baselines.member_programs import flat_members
from ..measure.inputs import make
from ..measure.loading import load_on
from ..report.document import Report, Row, environment
from ..measure.roofline import roof_of

if TYPE_CHECKING:
    from widepack import WideModel

Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
Progress = Callable[[str, int, int], None]

FLAT = "the artifact's member programs (give the model's factory to run your own modules)"
OWN = "your own modules"
COMPILE_LIMIT_S = 600.0
EAGER = ("loop", "vmap")  # baselines that need no preparing


def bench(
    model: str | os.PathLike[str] | WideModel,
    *,
    device: str = "cpu",
    batches: Sequence[int] = (1, 8, 32),
    backends: Sequence[str] = ("auto",),
    baselines: Sequence[str] = tuple(BASELINES),
    levels: bool = False,
    budget_s: float = 20.0,
    compile_limit_s: float = COMPILE_LIMIT_S,
    threads: int | None = None,
    pattern: str = "shared",
    modules: Sequence[nn.Module] | None = None,
    factory: Callable[[Mapping[str, Any]], nn.Module] | str | None = None,
    factory_args: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
    entry: str = "",
    pin: bool = False,
    roofline: bool = False,
    alone: bool = False,
    beside: Mapping[str, Run] = MappingProxyType({}),
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Time an artifact, or a loaded model, against the baselines.

    device: where an artifact is loaded and everything runs. backends: the first is what the verdicts are about, each other one a contestant
    `widepack[name]`; one that `widepack.load` refuses is skipped with its reason. levels: the steps from op after op to the plan as contestants too
    (`levels.py`). budget_s: seconds of measuring a batch, compilation aside. compile_limit_s: seconds that a baseline may take to compile. threads: threads
    inside an op, torch's own number where None. pattern: `shared` (every member sees the same inputs) or `each`. modules: the user's own modules in the
    members' order, or factory: makes one from a member's state dict (or its name, `file.py:factory`, with factory_args); without either the baselines run
    `ens.member(i)`. inputs: as in `compare`. entry: the method to call, forward or the artifact's first without it. roofline: count the program's work, and measure
    this machine's ceilings. alone: peak memory and start-up, each contestant in a process of its own; the modules must come from a factory's name, then.
    beside: further calls by name, timed in the same run and no baselines. dtype: of an artifact, as `widepack.load` takes it; the members are brought into it too.
    Raises: BenchError where the wide model's answers are not the loop's; UsageError for an unknown baseline or pattern; what `widepack.load` raises.
    """
    import widepack

    from ..measure.levels import load_levels

    check(batches, baselines, pattern)
    if isinstance(model, widepack.WideModel) and (tuple(backends) != ("auto",) or levels or alone or dtype):
        raise UsageError("backends, levels, memory, start-up and dtype are of an artifact: give its path, not a loaded model")
    if dtype and (levels or alone):
        raise UsageError("levels, memory and start-up are measured in the artifact's own dtype: leave dtype out")
    with noise.quiet(threads, pin), compiler_settings():
        skipped: dict[str, str] = {}
        others: dict[str, Any] = {}
        backend = backends[0] if backends else "auto"
        if isinstance(model, widepack.WideModel):
            ens, name = model, "model"
        else:
            torch._dynamo.reset()  # what other models of this process left there would be looked through at every call
            loaded, refused = load_backends(model, device, backends, dtype)
            backend, ens = next(iter(loaded.items()))
            others = {f"widepack[{b}]": m for b, m in loaded.items() if b != backend}
            skipped = {f"widepack[{b}]": why for b, why in refused.items()}
            if levels:
                steps, missing = load_levels(model, device)
                others.update(steps)
                skipped.update(missing)
            name = os.fspath(model)
        named = factory if isinstance(factory, str) else ""
        if modules is None and factory is not None:
            make_one = named_factory(factory, factory_args or {}, ens) if isinstance(factory, str) else factory
            modules = [own_module(make_one, ens.state_dict(i), str(m)) for i, m in enumerate(ens.members)]
        if modules is not None and dtype:
            modules = [m.to(find_dtype(dtype)) for m in modules]
        report = compare(
            ens,
            modules,
            batches,
            baselines=baselines,
            others=others,
            beside=beside,
            budget_s=budget_s,
            compile_limit_s=compile_limit_s,
            pattern=pattern,
            inputs=inputs,
            entry=entry,
            device=device,
            name=name,
            roofline=roofline,
            progress=progress,
        )
        report = replace(report, backend=backend, rows=tuple(replace(row, skipped={**skipped, **row.skipped}) for row in report.rows))
    if not alone or not report.rows:
        return report
    from ..processes.contestant import measured_alone

    unnamed = modules is not None and not named
    return measured_alone(
        report,
        model=os.fspath(name),
        factory=named,
        factory_args=factory_args or {},
        unnamed=unnamed,
        device=device,
        pin=pin,
        inputs=inputs,
        progress=progress,
    )


def load_backends(
    path: str | os.PathLike[str], device: str, backends: Sequence[str], dtype: str | None = None
) -> tuple[dict[str, WideModel], dict[str, str]]:
    """The artifact under each backend, and why others were refused. Raises: what `widepack.load` does where none is left."""
    import widepack

    loaded: dict[str, WideModel] = {}
    refused: dict[str, str] = {}
    first: Exception | None = None
    for backend in dict.fromkeys(backends or ("auto",)):
        try:
            loaded[backend] = load_on(path, device, backend, dtype)
        except Exception as error:
            if not isinstance(error, widepack.WidepackError) and len(tuple(backends)) < 2:
                raise
            first = first or error
            refused[backend] = reason(error)
    if not loaded:
        assert first is not None
        raise first
    return loaded, refused


def named_factory(name: str, args: Mapping[str, Any], ens: WideModel) -> Callable[[Mapping[str, Any]], nn.Module]:
    """The factory of this name, as `widepack build --model` takes it. Raises: UsageError."""
    from widepack.building.factories import find_factory

    return find_factory(name, args, ens.manifest.members[0].source)


def compare(
    ens: Any,
    modules: Sequence[nn.Module] | None = None,
    batches: Sequence[int] = (1, 8, 32),
    *,
    baselines: Sequence[str] = tuple(BASELINES),
    others: Mapping[str, Any] = MappingProxyType({}),
    beside: Mapping[str, Run] = MappingProxyType({}),
    budget_s: float = 20.0,
    compile_limit_s: float = COMPILE_LIMIT_S,
    pattern: str = "shared",
    inputs: Inputs | None = None,
    entry: str = "",
    device: str = "cpu",
    name: str = "model",
    roofline: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Time a loaded model against its members in `modules`, in their order (None: `ens.member(i)`).

    others: the same members loaded in other ways, by name: timed in the same run, and no baselines. beside: the same of calls that are no wide models. inputs: batch -> (positional, keyword) inputs, stacked
    `[N, ...]` for the pattern `each`; made from the manifest where None. The rest is as in `bench`.
    Raises: BenchError where an answer of `ens` or of another way is not the loop's, or `modules` are not as many as the members; UsageError as `bench`.
    """
    check(batches, baselines, pattern)
    own = OWN if modules is not None else FLAT
    manifest: Manifest | None = getattr(ens, "manifest", None)
    entry = entry or (manifest.entry if manifest else FORWARD)
    if manifest and entry not in manifest.entries:
        raise UsageError(f"there is no entry {entry!r}; the entries are {', '.join(manifest.entries)}")
    described = ens.entry(entry).entry if manifest else None
    carries = described is not None and bool(described.state)
    if described is not None and carries and modules is not None:
        raise UsageError(
            f"{entry} carries state ({', '.join(described.states)}), and your own modules go on from call to call: "
            f"leave the model out, and the baselines run the artifact's member programs, every call from the same state"
        )
    model = ens if described is not None else None

    def wanted(model: Any) -> Any:
        return model if entry == FORWARD and not carries else model.entry(entry)

    ens, ways = wanted(ens), {k: wanted(m) for k, m in others.items()}
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

        def ours(model: Any) -> Run:
            run: Run = model.each if each else model
            return functools.partial(run, state=state) if carries else run

        return _Contest(
            ours(ens),
            {**{k: ours(m) for k, m in ways.items()}, **beside},
            loop(members, each),
            runs,
            unmade,
            count,
            budget_s,
            compile_limit_s,
            sync,
            progress,
        )

    with torch.inference_mode(), compiler_settings():
        held = None if carries else contest({})
        for done, batch in enumerate(batches):
            if progress:
                progress(f"batch {batch}", done, len(batches))
            try:
                args, kwargs, sizes = call_inputs(described, inputs, batch, count if each else 0, device)
            except BenchError as refusal:
                refused[batch] = str(refusal)
                continue
            row = (held or contest(sizes)).row(batch, args, kwargs, sizes)
            if roofline and model is not None:
                try:
                    row = replace(row, roof=roof_of(model, entry, pattern, sizes, row.median_ms, device))
                except Exception as error:  # noqa: BLE001  # sizes that are data have no count; the times stand without it
                    row = replace(row, skipped={**row.skipped, "roofline": reason(error)})
            rows.append(row)
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
            skipped[name] = reason(error)
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


def call_inputs(
    entry: Entry | None, inputs: Inputs | None, batch: int, members: int, device: str
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]:
    if inputs is None:
        assert entry is not None  # only a loaded model has inputs made for it
        return make(entry, batch, members=members, device=device)
    args, kwargs = inputs(batch)
    return args, kwargs, {"B": batch}


@dataclass(frozen=True, slots=True)
class _Contest:
    """What stays the same from batch to batch: ours, ours in other ways, the modules, the baselines made of them."""

    ours: Run
    others: Mapping[str, Run]
    loop: Run
    runs: Mapping[str, Run]
    skipped: Mapping[str, str]
    members: int
    budget_s: float
    compile_limit_s: float
    sync: noise.Call | None
    progress: Progress | None

    def row(self, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: dict[str, int]) -> Row:
        """Compare answers, then time. Raises: BenchError where the wide model's answers are not the loop's."""
        with padding_kept():
            expected = self.loop(*args, **kwargs)
        self._right("the wide model", self.ours, batch, args, kwargs, expected)
        skipped = dict(self.skipped)
        calls: dict[str, noise.Call] = {}
        others: dict[str, noise.Call] = {}
        for name, run in self.others.items():
            try:
                self._right(name, run, batch, args, kwargs, expected)
            except BenchError:
                raise
            except Exception as error:  # noqa: BLE001  # a backend that fails in its own way is a result
                skipped[name] = reason(error)
            else:
                others[name] = _bound(run, args, kwargs)
        for number, (name, run) in enumerate(self.runs.items()):
            if self.progress and name not in EAGER:
                self.progress(f"batch {batch}: preparing {name}", number, len(self.runs))
            wrong = _wrong(run, args, kwargs, expected, self.compile_limit_s)
            if wrong:
                skipped[name] = wrong
            else:
                calls[name] = _bound(run, args, kwargs)
        if not calls:
            raise BenchError(f"batch {batch}: no baseline runs: {'; '.join(f'{k}: {v}' for k, v in skipped.items())}")
        if self.progress:
            self.progress(f"batch {batch}: measuring", 0, 1)
        race = noise.race(_bound(self.ours, args, kwargs), calls, others=others, budget_s=self.budget_s, sync=self.sync)
        return Row.of(batch, sizes, race, skipped, self.members)

    @staticmethod
    def _right(who: str, run: Run, batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any) -> None:
        """Raises: BenchError where the answers of one of ours are not the loop's."""
        with padding_kept():
            wrong = difference(run(*args, **kwargs), expected)
        if wrong:
            raise BenchError(
                f"batch {batch}: {who} does not give the members' answers, so its time means nothing: {wrong}. `widepack verify` says more"
            )


def _wrong(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any, limit_s: float) -> str:
    """Why a baseline cannot be timed here; empty where it can."""
    try:
        with at_most(limit_s):
            with padding_kept():
                wrong = difference(run(*args, **kwargs), expected)
            run(*args, **kwargs)  # as it will be timed: what is compiled for that is compiled now
    except Exception as error:  # noqa: BLE001  # compilers fail in their own ways, and that is a result
        return reason(error)
    return wrong and f"its answers are not the loop's: {wrong}"


def _bound(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> noise.Call:
    """The call that is timed, with as little as possible around it."""
    if len(args) == 1 and not kwargs:
        (only,) = args
        return lambda: run(only)
    return lambda: run(*args, **kwargs)


def reason(error: Exception) -> str:
    """The first line of an error that says something, shortened; of our own errors the text alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0][:300] if lines else ""
    if isinstance(error, WidepackError) and said:
        return said
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__

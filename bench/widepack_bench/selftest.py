"""Checks that widepack is right on this machine, with this torch and these kernels: `widepack selftest`.

1. **Primitives**: every strategy of every op of the registry over the op's samples, N members with random
   values, against the op run once for each member. Numbers are compared with the op in float64: the error may
   be 4 times the members' largest error plus 32 ulp of the answer's largest number, because strategies add in
   another order. Integers and booleans are equal; NaN and infinities are in the same places. Where float64
   may give another valid answer (the sign of an eigenvector), the member's own answer counts. For random ops,
   shape and dtype count.
2. **Blocks**: each reference block is built into an artifact, which compares it with its members in float64,
   and loaded under `auto`, `wide` and `loop`, which runs its probe.

| preset | members | which arguments differ by member | memory |
|---|---|---|---|
| `ci` | 2 | all, then one alone each, three mixes at most | member-major |
| `quick` | 3 | seven mixes at most | and channel-packed |
| `full` | 5 | thirty-two mixes at most | and channel-packed |
"""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from widepack import primitives as _primitives  # noqa: F401  # fills the registry
from widepack.ir import ops
from widepack.ir.kinds import SIZES
from widepack.ir.values import Shared, Stacked, Value
from widepack.lowering.interpreter import applicable
from widepack.registry.registry import REGISTRY, Strategy, always
from widepack.registry.samples import SAMPLES, Draw, Sample
from widepack.registry.sequential import sequential
from widepack.registry.writer import EagerWriter

from .baselines.members import reason

FORMAT = "widepack.selftest/1"
ULPS, TIMES = 32, 4
NO_TRUTH = (
    1e-3  # Relative to the answer's scale: a larger distance from float64 means another decision there.
)
UNDEFINED = {"aten.empty_like.default", "aten.new_empty.default"}  # Their values are not defined.
SEQUENTIAL = Strategy(
    "sequential", lambda w, *args, **kwargs: sequential(w, w.op, args, kwargs), always, "once for each member"
)
VIEWS = {
    "aten.view.default",
    "aten._unsafe_view.default",
}  # Once for each member, they would need new memory.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a preset checks."""

    members: int
    mixes: int
    packed: bool


EXTENTS = {"ci": Extent(2, 3, False), "quick": Extent(3, 7, True), "full": Extent(5, 32, True)}


@dataclass(slots=True)
class Checked:
    """One strategy of an op, or one block. cases: the number of checks. wrong: the first failure as text."""

    name: str
    strategy: str
    cases: int = 0
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """All checks. untried: strategies that no sample reaches on this machine (`op strategy`)."""

    primitives: list[Checked] = field(default_factory=list)
    blocks: list[Checked] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Checked]:
        return [c for c in (*self.primitives, *self.blocks) if c.wrong]

    @property
    def holds(self) -> bool:
        return not self.wrong

    def to_json(self) -> dict[str, Any]:
        def rows(checked: Sequence[Checked]) -> list[dict[str, Any]]:
            return [
                {
                    "name": c.name,
                    "strategy": c.strategy,
                    "cases": c.cases,
                    "holds": not c.wrong,
                    "wrong": c.wrong,
                }
                for c in checked
            ]

        return {
            "format": FORMAT,
            "primitives": rows(self.primitives),
            "blocks": rows(self.blocks),
            "untried": self.untried,
            "holds": self.holds,
        }


def check_primitives(
    preset: str = "ci", only: Sequence[str] = (), progress: Progress | None = None
) -> tuple[list[Checked], list[str]]:
    """Checks strategies of registered ops against the members' own answers.

    Args:
        preset: How many samples are tried: `ci`, `quick` or `full`.
        only: The ops. Default: all.
        progress: Is called with (stage, done, total).

    Returns:
        The checks, and the strategies that no sample reaches.

    Example:
        >>> from widepack_bench.selftest import check_primitives
        >>> checks, untried = check_primitives(only=["aten.relu.default"])
        >>> [c.wrong for c in checks if c.wrong]
        []
    """
    found: dict[tuple[str, str], Checked] = {}
    names = list(only) or sorted(REGISTRY)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Warnings of ops are not about the user's model.
        for number, op in enumerate(names):
            if progress:
                progress("ops", number, len(names))
            for strategy, wrong in _cases(op, EXTENTS[preset]):
                row = found.setdefault((op, strategy), Checked(op, strategy))
                row.cases += 1
                row.wrong = row.wrong or wrong
    untried = [f"{op} {s}" for op in names for s in REGISTRY[op].strategies if (op, s) not in found]
    return list(found.values()), untried


def _cases(op: str, extent: Extent) -> Iterator[tuple[str, str]]:
    """Yields each case of an op: the strategy, and what is wrong with it."""
    if op not in SAMPLES:  # Ops that others registered without samples.
        return
    drawn = [SAMPLES[op](Draw(17 + i)) for i in range(extent.members)]
    pure = all(ops.pure(op, *sample) for sample in drawn[0])
    for number, many in enumerate(zip(*drawn, strict=True)):
        given = _tensors(many[0])
        truths: dict[tuple[bool, ...], _OpTruth] = {}
        for kinds in _mixes(len(given), extent.mixes):
            for packed in (False, True) if extent.packed and any(t.ndim >= 2 for t in given) else (False,):
                args, kwargs, own = _wide(list(many), kinds, packed)
                if kinds not in truths:
                    truths[kinds] = _OpTruth(op, own, pure)
                w = EagerWriter(extent.members)
                w.op = op
                last = [SEQUENTIAL] if op not in SIZES and (op not in VIEWS or not packed) else []
                words = ", ".join(
                    f"{'Stacked' if k else 'Shared'} {str(t.dtype)[6:]}{list(t.shape)}"
                    for k, t in zip(kinds, given, strict=True)
                )
                for s in (*applicable(w, op, args, kwargs), *last):
                    try:
                        wrong = truths[kinds].wrong(_outputs(s.rule(w, *args, **kwargs), extent.members))
                    except Exception as error:  # noqa: BLE001  # any error of a rule or kernel is a result of the check
                        wrong = reason(error)
                    yield (
                        s.name,
                        wrong and f"sample {number} ({words}{', channel-packed' if packed else ''}): {wrong}",
                    )


class _OpTruth:
    """The answers of each member's op, in its dtype and in float64."""

    def __init__(self, op: str, own: Sequence[Sample], pure: bool) -> None:
        self.numbers = pure and op not in UNDEFINED
        self.own = [_list(ops.resolve(op)(*a, **k)) for a, k in own]
        self.exact = (
            [self._in_double(op, sample, mine) for sample, mine in zip(own, self.own, strict=True)]
            if self.numbers
            else self.own
        )

    @staticmethod
    def _in_double(op: str, sample: Sample, own: list[Any]) -> list[Any]:
        """Returns the answers in float64.

        It returns the member's own answer where the op has no float64, or makes another decision there.
        """
        try:
            args, kwargs = _raised(sample)
            exact = _list(ops.resolve(op)(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError):
            return own
        if len(exact) != len(own):
            return own
        return [e if _near(o, e) else o for o, e in zip(own, exact, strict=True)]

    def wrong(self, found: Sequence[Any]) -> str:
        """Returns what is wrong with the answers of all members; empty where they are right."""
        for k in range(len(self.own[0])):
            slack = max(_error(own[k], exact[k]) for own, exact in zip(self.own, self.exact, strict=True))
            for i, (own, exact) in enumerate(zip(self.own, self.exact, strict=True)):
                got = _list(found[i])
                if len(got) != len(own):
                    return f"{len(got)} outputs, the member gives {len(own)}"
                if got[k] is not None and (said := self._one(got[k], own[k], exact[k], slack)):
                    return f"output {k}, member {i}: {said}"
        return ""

    def _one(self, got: Any, own: Any, exact: Any, slack: float) -> str:
        if not isinstance(own, Tensor):
            return "" if got == own else f"{got}, the member's own is {own}"
        if got.shape != own.shape or got.dtype != own.dtype:
            return f"{list(got.shape)} {got.dtype}, the member's own is {list(own.shape)} {own.dtype}"
        if not self.numbers:
            return ""
        if not (own.is_floating_point() or own.is_complex()):
            return (
                ""
                if torch.equal(got, own)
                else f"{int((got != own).sum())} of {own.numel()} values differ from the member's own"
            )
        if not (torch.equal(got.isnan(), own.isnan()) and torch.equal(got.isinf(), own.isinf())):
            return "NaN or infinity in other places than in the member's own"
        finite = own[torch.isfinite(own)].abs()
        bound = TIMES * slack + ULPS * torch.finfo(own.dtype).eps * (
            float(finite.max()) if finite.numel() else 0.0
        )
        error = _error(got, exact)
        return "" if error <= bound else f"an error of {error:.2e} against float64, the bound is {bound:.2e}"


def _error(a: Any, exact: Any) -> float:
    """Returns the largest error of finite numbers; 0 for values that are no floating tensors."""
    if not isinstance(a, Tensor) or not (a.is_floating_point() or a.is_complex()) or not a.numel():
        return 0.0
    fine = torch.isfinite(a) & torch.isfinite(exact)
    return float((a.to(exact.dtype)[fine] - exact[fine]).abs().max()) if bool(fine.any()) else 0.0


def _near(own: Any, exact: Any) -> bool:
    """Whether a float64 answer is the same answer."""
    if (
        not isinstance(own, Tensor)
        or not isinstance(exact, Tensor)
        or not (own.is_floating_point() or own.is_complex())
        or own.shape != exact.shape
    ):
        return False
    if not torch.equal(own.isnan(), exact.isnan()) or not torch.equal(own.isinf(), exact.isinf()):
        return False
    finite = own[torch.isfinite(own)].abs()
    eps = torch.finfo(own.dtype).eps
    return not finite.numel() or _error(own, exact) <= max(NO_TRUTH, 1000 * eps) * float(finite.max())


def _raised(value: Any) -> Any:
    """Returns arguments with floats in float64 and complex numbers in complex128."""
    up = {
        torch.float32: torch.float64,
        torch.float16: torch.float64,
        torch.bfloat16: torch.float64,
        torch.complex64: torch.complex128,
    }
    if isinstance(value, Tensor):
        return value.to(up.get(value.dtype, value.dtype))
    if isinstance(value, torch.dtype):
        return up.get(value, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_raised(v) for v in value)
    return {k: _raised(v) for k, v in value.items()} if isinstance(value, dict) else value


def _list(answer: Any) -> list[Any]:
    """Returns an op's outputs as one list, without nesting."""
    return [part for a in answer for part in _list(a)] if isinstance(answer, (list, tuple)) else [answer]


def _tensors(arg: Any) -> list[Tensor]:
    """Returns the tensors among arguments, in order."""
    if isinstance(arg, Tensor):
        return [arg]
    if isinstance(arg, (list, tuple)):
        return [t for a in arg for t in _tensors(a)]
    return [t for a in arg.values() for t in _tensors(a)] if isinstance(arg, dict) else []


def _put(arg: Any, to: Iterator[Any]) -> Any:
    """Replaces the tensors of arguments by the next values of `to`."""
    if isinstance(arg, Tensor):
        return next(to)
    if isinstance(arg, (list, tuple)):
        return type(arg)(_put(a, to) for a in arg)
    return {k: _put(a, to) for k, a in arg.items()} if isinstance(arg, dict) else arg


def _mixes(count: int, most: int) -> list[tuple[bool, ...]]:
    """Returns which tensors are Stacked: all first, then each alone, then the other mixes."""
    every = [c for c in itertools.product((True, False), repeat=min(count, 8)) if any(c) or not count]
    full = [(*c, *[True] * (count - len(c))) for c in every]
    return sorted(full, key=lambda c: (not all(c), sum(c) != 1))[:most]


def _wide(many: list[Sample], kinds: tuple[bool, ...], packed: bool) -> tuple[Any, Any, list[Sample]]:
    """Returns arguments for a rule, and each member's own. packed: over memory `[B, N*C, ...]`."""
    columns: list[Shared | Stacked] = []
    own: list[list[Tensor]] = []
    for stacked, parts in zip(kinds, zip(*(_tensors(s) for s in many), strict=True), strict=True):
        if stacked:
            x = torch.stack(parts)
            columns.append(
                Stacked(
                    Value(
                        None, x.transpose(0, 1).contiguous().transpose(0, 1) if packed and x.ndim >= 3 else x
                    )
                )
            )
            own.append(list(parts))
        else:
            columns.append(Shared(Value(None, parts[0])))
            own.append([parts[0]] * len(many))
    args, kwargs = _put(many[0], iter(columns))
    return args, kwargs, [_put(many[0], iter([o[i] for o in own])) for i in range(len(many))]


def _outputs(result: Any, members: int) -> list[Any]:
    """Returns a rule's result as each member's outputs; None for outputs that the rule leaves out."""
    if isinstance(result, (tuple, list)):
        return [list(row) for row in zip(*(_outputs(r, members) for r in result), strict=True)]
    if result is None:
        return [None] * members
    held = result.value.fake if isinstance(result.value, Value) else result.value
    return list(held.unbind(0)) if isinstance(result, Stacked) else [held] * members


def check_blocks(
    preset: str = "ci", only: Sequence[str] = (), progress: Progress | None = None
) -> list[Checked]:
    """Builds every reference block, or those in `only`, and loads it in three ways."""
    import widepack

    from .layers.in_memory import members
    from .models.blocks import BLOCKS

    found = []
    names = list(only) or list(BLOCKS)
    for number, name in enumerate(names):
        block = BLOCKS[name]
        if progress:
            progress(f"block {name}", number, len(names))
        row = Checked(name, "auto, wide, loop")
        found.append(row)
        with tempfile.TemporaryDirectory(prefix="widepack-selftest-") as folder:
            try:
                paths = []
                for i, module in enumerate(members(block.make, EXTENTS[preset].members)):
                    paths.append(f"{folder}/{i}.pt")
                    torch.save(module.state_dict(), paths[-1])
                widepack.build(
                    paths,
                    f"{folder}/{name}.wide",
                    model=block.model,
                    inputs=list(block.inputs),
                    targets=("cpu",),
                    pt2=False,
                )
                for strategies in (None, "wide", "loop"):
                    widepack.load(f"{folder}/{name}.wide", strategies=strategies)
                    row.cases += 1
            except Exception as error:  # noqa: BLE001  # any error is a result of the check
                row.wrong = reason(error)
    return found

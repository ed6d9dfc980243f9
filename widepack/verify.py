"""The two comparisons that make "right", and the probe.

(a) the user's own module of member i against the member program with weights i, in one dtype, at batch sizes other than the export's: a wrong capture.
(b) the wide program against the member program raised to float64: a wrong lowering; on failure a bisect names the first wrong node.

Members are taken one at a time. What every answer is held to stands in compare.py.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.program import Program, substitute

from . import ops
from .codec import decode
from .compare import Pool, floating
from .errors import VerificationError
from .lower import Lowered
from .raise64 import double_by_default, raise_program, raise_value
from .replay import CPU
from .runtime import Executable, Loop, graph_module
from .samples import Source, draw_all, rows

SAMPLES = 64  # numbers per output and member that a comparison needs, at least
Weights = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """Inputs of one verified call. label: for the record. pattern: shared or each. inputs: by member, leaf by leaf. user: whether the module is run too."""

    label: str
    pattern: str
    inputs: list[list[torch.Tensor]]
    user: bool

    def stacked(self) -> list[torch.Tensor]:
        """What the wide program takes."""
        return self.inputs[0] if self.pattern == "shared" else [torch.stack(v) for v in zip(*self.inputs)]


@dataclass
class Answers:
    """Of one call: every member's own answer and its float64 answer, output by output."""

    own: list[list[torch.Tensor]] = field(default_factory=list)
    truth: list[list[torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """What is verified.

    programs, signatures: member programs and each member's index into them. sources: how inputs are drawn. weights(i): member i's weights by source name.
    module(i): the user's own module with member i's weights, or None. bind: leaves -> (args, kwargs) of the module. fits(sizes): whether all guards hold.
    numbers: what the member returns beside tensors, in order.
    """

    members: tuple[str, ...]
    programs: Sequence[Program]
    signatures: Sequence[int]
    sources: Sequence[Source]
    outputs: Sequence[str]
    sizes: Mapping[str, int]
    batch: str
    weights: Callable[[int], Weights]
    module: Callable[[int], nn.Module] | None
    bind: Callable[[Sequence[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    fits: Callable[[Mapping[str, int]], bool]
    numbers: Sequence[Any] = ()


def calls(subject: Subject, patterns: Sequence[str]) -> list[Call]:
    """The calls of a verification: batches 1, 2 and 5 as rows of a large one, other sizes of the other dims, for each pattern."""
    made: list[Call] = []
    n = len(subject.members)
    letter = subject.batch
    large = _large(subject) if letter else 0
    for pattern in patterns:
        whole = [
            draw_all(subject.sources, {**subject.sizes, **({letter: large} if letter else {})}, 1 + (i if pattern == "each" else 0)) for i in range(n)
        ]
        made.append(Call(f"{letter or 'size'}={large or 'fixed'}", pattern, whole, not letter))
        for b in (1, 2, 5) if letter else ():
            if b < large and subject.fits({**subject.sizes, letter: b}):
                made.append(Call(f"{letter}={b}", pattern, [rows(v, subject.sources, letter, b) for v in whole], True))
        other = _other_sizes(subject)
        if other != dict(subject.sizes):
            label = ", ".join(f"{k}={v}" for k, v in other.items())
            made.append(Call(label, pattern, [draw_all(subject.sources, other, 7 + (i if pattern == "each" else 0)) for i in range(n)], True))
    return made


def _large(subject: Subject) -> int:
    """The large batch: enough rows for SAMPLES numbers in the smallest output."""
    least = 6
    values = Executable(subject.programs[0], subject.weights(0), CPU, prologue=False).run(
        *draw_all(subject.sources, {**subject.sizes, subject.batch: least}, 1)
    )
    smallest = min((v.numel() for v in values if isinstance(v, torch.Tensor) and v.numel()), default=SAMPLES)
    wanted = max(least, min(SAMPLES, math.ceil(SAMPLES * least / smallest)))
    return next((b for b in range(wanted, 0, -1) if subject.fits({**subject.sizes, subject.batch: b})), subject.sizes[subject.batch])


def _other_sizes(subject: Subject) -> dict[str, int]:
    """Sizes of the other dims unlike the example's, as far as bounds and guards let them."""
    found = dict(subject.sizes)
    for letter, size in subject.sizes.items():
        if letter == subject.batch:
            continue
        for other in (size + 2, size - 2, size + 1, size - 1, 2 * size, size // 2):
            if other > 0 and subject.fits({**found, letter: other}):
                found[letter] = other
                break
    if found != dict(subject.sizes) and subject.batch and subject.fits({**found, subject.batch: 3}):
        found[subject.batch] = 3
    return found


def fitting(dims: Mapping[str, tuple[int, int | None]], guards: Sequence[Any]) -> Callable[[Mapping[str, int]], bool]:
    """Whether sizes lie in the dims' bounds and satisfy the guards."""

    def fits(sizes: Mapping[str, int]) -> bool:
        inside = all(least <= sizes[d] and (most is None or sizes[d] <= most) for d, (least, most) in dims.items())
        return inside and all(guard_forms.holds(g, sizes) for g in guards)

    return fits


def answers(
    subject: Subject, made: Sequence[Call], pools: Sequence[Pool], progress: Callable[[int, int], None] | None = None
) -> tuple[list[Answers], list[Pool], bool]:
    """Every member's own and float64 answers, and comparison (a).

    Returns: the answers by call; the pools of comparison (a); whether there is a float64 truth (else the member's own answers stand for it).
    Raises: VerificationError for a wrong capture.
    """
    found = [Answers() for _ in made]
    captured = [Pool(p.name) for p in pools]
    raised = True
    runners = {
        s: (graph_module(subject.programs[s], CPU), graph_module(raise_program(subject.programs[s]), CPU)) for s in sorted(set(subject.signatures))
    }
    for i, name in enumerate(subject.members):
        weights = subject.weights(i)
        program = subject.programs[subject.signatures[i]]
        own_run, truth_run = runners[subject.signatures[i]]
        given = [weights[s.source] for s in program.weights]
        module = subject.module(i) if subject.module is not None else None
        doubles = [raise_value(g) for g in given]
        for call, into in zip(made, found):
            with torch.inference_mode():
                own = list(own_run.forward(*given, *call.inputs[i]))
                try:
                    with double_by_default():
                        truth = list(truth_run.forward(*doubles, *(raise_value(x) for x in call.inputs[i])))
                except RuntimeError:  # an op that has no float64 kernel: the member's own answer stands for the truth, and the record says so
                    truth, raised = [o.to(torch.float64) if o.is_floating_point() else o for o in own], False
            into.own.append(own)
            into.truth.append([t.to(torch.float64) if floating(o) and not t.is_complex() else t for t, o in zip(truth, own)])
            for pool, o, t in zip(pools, own, into.truth[-1]):
                pool.add_own(o, t)
            if module is not None and call.user:
                theirs = _tensors(name, run_module(module, *subject.bind(call.inputs[i])), own, subject.numbers)
                for pool, y, o in zip(captured, theirs, own):
                    pool.add_wide(name, call.label, y, o, o.to(torch.complex128 if o.is_complex() else torch.float64) if floating(o) else o)
        if progress:
            progress(i + 1, len(subject.members))
    if unsteady := next((w for p in pools if raised and (w := p.unsteady())), ""):
        raise VerificationError(
            f"{unsteady}: nothing can be proved of such a model. Random numbers or state in eval mode do this, and so do weights at which the model is "
            f"ill-conditioned; make forward deterministic, or check the checkpoints"
        )
    for pool, whole in zip(captured, pools):
        pool.eps, pool.own_square, pool.own_max, pool.scale_square, pool.count = (
            whole.eps,
            whole.own_square,
            whole.own_max,
            whole.scale_square,
            whole.count,
        )
        if not raised:
            pool.own_max, pool.own_square = max(pool.own_max, 1e-5 * pool.scale), max(pool.own_square, (1e-5 * pool.scale) ** 2 * pool.count)
        if wrong := pool.wrong():
            raise VerificationError(
                f"the captured program does not give the members' own answers: {wrong}. The members differ in something that is no weight (a Python number or list "
                f"drawn in __init__), or the export is wrong; make it a buffer or an argument of the factory"
            )
    return found, captured, raised


def run_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The user's module on one call, without the nested-tensor path that answers differently at padded positions; buffers are restored."""
    before = {n: b.clone() for n, b in module.named_buffers()}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            result = module(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
            for n, b in module.named_buffers():
                b.copy_(before[n])
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(result)]  # a parameter may be an output


def _tensors(member: str, found: Sequence[Any], own: Sequence[torch.Tensor], numbers: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of what a module returned; the rest must be what the captured program returns for everybody."""
    theirs = [x for x in found if isinstance(x, torch.Tensor)]
    rest = [x for x in found if x is not None and not isinstance(x, torch.Tensor)]  # fields that are None may be no leaves of the member's own class
    if rest != [x for x in numbers if x is not None]:
        raise VerificationError(
            f"member {member} returns {rest} beside its tensors, the captured program {list(numbers)}: numbers in the result belong to the program and "
            f"must be the same for all members and calls; return them as tensors, or leave them out"
        )
    if len(theirs) != len(own):
        raise VerificationError(
            f"member {member} gives {len(theirs)} tensors, the captured program {len(own)}; what forward returns must not depend on values"
        )
    return theirs


def way_at_one(subject: Subject, letter: str) -> str:
    """Whether the member takes another way where a dim is 1, in words; empty when its program holds there.

    Export takes every dynamic dim to be at least 2, and follows `if x.shape[0] > 1` without a condition: only the member itself can tell.
    """
    sizes = {**subject.sizes, letter: 1}
    return _way_at(subject, sizes) if subject.fits(sizes) else ""


def needless(subject: Subject, dims: Mapping[str, tuple[int, int | None]], guards: Sequence[Any]) -> set[int]:
    """Which of the conditions are export's own and not the member's.

    Export asks of every size whether it is 0 or 1, of every two strides whether they are equal, and holds on to the answer: most such conditions say nothing
    of what is computed, and would refuse a batch of 1. The member itself is asked at small sizes where they do not hold: those stay where its answer, or its
    failure, is another than its program's.
    """
    letters = list(subject.sizes)
    if not letters or subject.module is None:
        return set()
    small = [range(1, 7 if len(letters) <= 3 and (d != subject.batch or len(letters) < 3) else 4) for d in letters]
    choices = [sorted({*s, subject.sizes[d]}) for d, s in zip(letters, small)]
    grid = [dict(zip(letters, picked)) for picked in itertools.islice(itertools.product(*choices), 1000)]
    whole = [sizes for sizes in grid if min(sizes.values()) > 1]
    own = {i for i, g in enumerate(guards) if guard_forms.of_small_sizes(g) or all(guard_forms.holds(g, sizes) for sizes in whole)}
    inside = fitting(dims, [g for i, g in enumerate(guards) if i not in own])
    tried: dict[frozenset[int], list[dict[str, int]]] = {}
    for sizes in grid:
        broken = frozenset(i for i in own if not guard_forms.holds(guards[i], sizes))
        if broken and inside(sizes):
            tried.setdefault(broken, []).append(sizes)
    gone, kept = set[int](), set[int]()
    for broken, where in sorted(tried.items(), key=lambda row: len(row[0])):
        if not broken & kept:  # what breaks one that stays is refused anyway
            (kept if any(_way_at(subject, sizes) for sizes in (where[0], where[-1])) else gone).update(broken)
    return gone - kept


def _way_at(subject: Subject, sizes: Mapping[str, int]) -> str:
    """How member 0 and its program differ at these sizes, in words; empty where they do not."""
    if subject.module is None:
        return ""
    module, weights = subject.module(0), subject.weights(0)
    program = subject.programs[subject.signatures[0]]
    inputs = draw_all(subject.sources, sizes, 3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the member warns of at such a size is no news of this build
            with torch.inference_mode():
                own = graph_module(program, CPU).forward(*(weights[s.source] for s in program.weights), *inputs)
            theirs = [x for x in run_module(module, *subject.bind(inputs)) if isinstance(x, torch.Tensor)]
    except (RuntimeError, ValueError, IndexError) as e:
        return f"the member or its program fails there: {str(e).splitlines()[0][:200]}"
    for o, t in zip(own, theirs):
        if o.shape != t.shape:
            return f"the member gives {list(t.shape)} there, its program {list(o.shape)}"
        close = torch.allclose(o, t, rtol=1e-3, atol=1e-4 * _largest(t), equal_nan=True) if floating(t) else torch.equal(o, t)
        if not close:
            return "the member's code takes another way there"
    return ""


def _largest(t: torch.Tensor) -> float:
    """The largest finite number's absolute value."""
    fine = t[torch.isfinite(t)].abs()
    return float(fine.max()) if fine.numel() else 0.0


def check_wide(
    subject: Subject, program: Program, weights: Weights, pattern: str, made: Sequence[Call], found: Sequence[Answers], pools: Sequence[Pool]
) -> list[Pool]:
    """Comparison (b) of one wide program.

    weights: by source name, `[N, ...]` or shared, or a list of N. Returns: the pools with the wide answers' errors in them; `wrong()` tells.
    """
    run = Executable(program, weights, CPU)
    checked = [Pool(p.name, p.eps, p.own_square, p.own_max, p.scale_square, p.count) for p in pools]
    for call, answer in zip(made, found):
        if call.pattern != pattern:
            continue
        wide = run.run(*call.stacked())
        for k, pool in enumerate(checked):
            for i, name in enumerate(subject.members):
                part = wide[k] if program.outputs[k].kind == "shared" else wide[k][i]
                pool.add_wide(name, call.label, part, answer.own[i][k], answer.truth[i][k])
    return checked


def widen(pools: Sequence[Pool]) -> None:
    """Without a float64 truth, float32 against float32 is held to 1e-5 of the scale."""
    for pool in pools:
        pool.own_max, pool.own_square = max(pool.own_max, 1e-5 * pool.scale), max(pool.own_square, (1e-5 * pool.scale) ** 2 * pool.count)


def bisect(subject: Subject, simplified: Sequence[Program], lowered: Lowered, weights: Weights, call: Call) -> str:
    """The first node of the member program whose wide value is wrong, in words; empty when every value that can be compared is right."""
    wide = values_of(lowered.program, weights, call.stacked())
    pools: dict[str, Pool] = {}
    parts: dict[str, list[Any]] = {}
    n = len(subject.members)
    for i in range(n):
        program = simplified[subject.signatures[i]]
        own = values_of(program, subject.weights(i), call.inputs[i])
        with double_by_default():
            truth = values_of(
                raise_program(program), {k: raise_value(v) for k, v in subject.weights(i).items()}, [raise_value(x) for x in call.inputs[i]]
            )
        for node in program.nodes:
            at = lowered.values.get(node.name, "")
            if at in wide and isinstance(own[node.name], torch.Tensor):
                kind = lowered.kinds[node.name]
                part = wide[at] if kind == "shared" else wide[at][i]
                t = truth[node.name]
                pool = pools.setdefault(node.name, Pool(node.name))
                pool.add_own(own[node.name], t)
                parts.setdefault(node.name, []).append((subject.members[i], part, own[node.name], t))
    for node in simplified[0].nodes:
        if node.name not in pools:
            continue
        pool = pools[node.name]
        for name, part, own_value, t in parts[node.name]:
            pool.add_wide(name, call.label, part, own_value, t)
        if wrong := pool.wrong():
            return f"first wrong node: {node.name} ({node.op}, strategy {lowered.used.get(node.name, '?')}{f', from {node.source}' if node.source else ''}): {wrong}"
    return ""


def values_of(program: Program, weights: Weights, inputs: Sequence[Any]) -> dict[str, Any]:
    """Every value of a program, by name, run node by node."""
    values: dict[str, Any] = {s.name: weights[s.source] for s in program.weights}
    values.update({s.name: x for s, x in zip(program.inputs, inputs)})
    with torch.inference_mode():
        for node in program.nodes:
            args = decode(substitute(node.args, values.__getitem__), CPU)
            if node.body is not None:
                values[node.name] = Loop(node.body, program.members, CPU)(*args)
            else:
                values[node.name] = ops.resolve(node.op)(*args, **decode(substitute(node.kwargs, values.__getitem__), CPU))
    return values

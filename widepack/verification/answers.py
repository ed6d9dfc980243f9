"""The two comparisons that make "right", and the probe.

(a) the user's own module of member i against the member program with weights i, in one dtype, at batch sizes other than the export's: a wrong capture. What no
    answer shows (an eps within rounding, a bound that is not reached) is asked of the modules themselves: alike.py.
(b) the wide program against the member program raised to float64: a wrong lowering; on failure a bisect names the first wrong node.

Members are taken one at a time. What every answer is held to stands in compare.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.program import Program, refs, substitute

from ..ir import ops
from .same_program import Alike
from ..capture.state import owner_of
from ..ir.encoding import decode, dtype_of
from .tolerance import Pool, floating
from ..spec.entries import FORWARD, method_of
from ..errors import VerificationError, WidepackError
from ..lowering.lower import Lowered
from ..system.memory import give_back
from ..capture.module_tensors import tensors_of
from ..ir.float64 import double_by_default, raise_program, raise_value, single_program, single_value
from .op_record import Recorded
from ..ir.fake_values import CPU
from ..capture.results import known_forms
from ..runtime.graph_module import Executable, Function, Loop, graph_module
from ..spec.draws import Source, draw, draw_all, rows
from ..spec.state import BUFFER, CHANGED, Carried

SAMPLES = 64  # numbers per output and member that a comparison needs, at least
MORE = 32  # calls at most that are added to reach them, where an output is a number or two whatever the batch
LATE_BYTES = 16 * 2**20  # of a member's weights: larger ones are raised to float64 layer by layer
Weights = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """Inputs of one verified call.

    label: for the record. pattern: shared or each. inputs: by member, leaf by leaf. user: whether the module is run too. carried: the numbers of the inputs that
    are states, one a member in every pattern. after: the number of the call whose new states this one begins with.
    """

    label: str
    pattern: str
    inputs: list[list[torch.Tensor]]
    user: bool
    carried: frozenset[int] = frozenset()
    after: int | None = None

    def stacked(self, members: Sequence[int] | None = None) -> list[torch.Tensor]:
        """What the wide program takes; that of some members, where they are named."""
        one = self.pattern == "shared"
        chosen = self.inputs if members is None else [self.inputs[i] for i in members]
        return [v[0] if one and i not in self.carried else torch.stack(v) for i, v in enumerate(zip(*chosen))]


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
    numbers: what the member returns beside tensors, in order. method: the module's method that the programs are of.
    states: what the caller carries; initial(i, state): what it begins as in member i, or None for an input. alike: what holds the modules to the captured one.
    ask: has the weights of these members read, before they are.
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
    method: str = FORWARD
    states: Sequence[Carried] = ()
    initial: Callable[[int, Carried], torch.Tensor | None] = lambda i, state: None
    alike: Alike | None = None
    ask: Callable[[Sequence[int]], None] = lambda members: None
    made: dict[tuple[int, bool, bool], Function] = field(default_factory=dict)

    def run(self, i: int, *, exact: bool = False, late: bool = False) -> Function:
        """Member i's program as a function of its weights, then its inputs; `exact`: in float64, of weights that are; `late`: of weights that are not yet. Made once."""
        key = self.signatures[i], exact, late
        if key not in self.made:
            program = self.programs[self.signatures[i]]
            self.made[key] = graph_module(raise_program(program, late) if exact or late else program, CPU).forward
        return self.made[key]

    def draw(self, sizes: Mapping[str, int], seed: int, pattern: str, members: int) -> list[list[torch.Tensor]]:
        """Inputs of a call by member: equal ones in the pattern `shared`, but for states: a buffer is what the member begins with, an input its own."""
        made = [draw_all(self.sources, sizes, seed + (i if pattern == "each" else 0)) for i in range(members)]
        for state in self.states:
            for i, leaves in enumerate(made):
                begins = self.initial(i, state)
                leaves[state.input] = draw(self.sources[state.input], sizes, (seed + i) * 1009 + state.input) if begins is None else begins.clone()
        return made


def calls(subject: Subject, patterns: Sequence[str]) -> list[Call]:
    """The calls of a verification: batches 1, 2 and 5 as rows of a large one, other sizes of the other dims, for each pattern."""
    made: list[Call] = []
    n = len(subject.members)
    letter = subject.batch
    carried = frozenset(s.input for s in subject.states)
    large = _large(subject) if letter else 0
    other = _other_sizes(subject)
    more = min(MORE, math.ceil(SAMPLES / _smallest(subject, {**subject.sizes, **({letter: large} if letter else {})})) - 1)
    for pattern in patterns:
        at = {**subject.sizes, **({letter: large} if letter else {})}
        whole = subject.draw(at, 1, pattern, n)
        tried = [Call(f"{letter or 'size'}={large or 'fixed'}", pattern, whole, not letter, carried)]
        batches = [large]
        for b in (1, 2, 5) if letter else ():
            if b < large and subject.fits({**subject.sizes, letter: b}):
                batches.append(b)
                tried.append(Call(f"{letter}={b}", pattern, [rows(v, subject.sources, letter, b) for v in whole], True, carried))
        kept = [(c, b) for c, b in zip(tried, batches) if _all_take(subject, c)]
        steps = [(len(made) + k, b) for k, (_, b) in enumerate(kept)]  # numbers of the calls that a second one follows, and their batches
        made += [c for c, _ in kept]
        if carried:  # the next step of each: other inputs, and the states that the first left
            following = subject.draw(at, 5, pattern, n)
            for number, b in steps:
                cut = following if b == large else [rows(v, subject.sources, letter, b) for v in following]
                made.append(replace(made[number], label=f"{made[number].label}, step 2", inputs=cut, after=number))
        ones = [{**subject.sizes, d: 1} for d in subject.sizes if d != letter and subject.fits({**subject.sizes, d: 1})]
        for sizes in [*([other] if other != dict(subject.sizes) else []), *ones]:  # a dim of size 1 is one that ops may drop or spread
            label = ", ".join(f"{k}={v}" for k, v in sizes.items())
            call = Call(label, pattern, subject.draw(sizes, 7, pattern, n), True, carried)
            made += [call] if _all_take(subject, call) else []
        for k in range(more):
            call = Call(f"{letter or 'size'}={large or 'fixed'}, again {k + 1}", pattern, subject.draw(at, 101 + 7 * k, pattern, n), False, carried)
            made += [call] if _all_take(subject, call) else []
        if not any(c.user for c in made if c.pattern == pattern):  # the example's own indices, which export has run
            made.append(Call("the example", pattern, [like_example(subject, i if pattern == "each" else 0) for i in range(n)], True, carried))
    return made


def like_example(subject: Subject, seed: int) -> list[torch.Tensor]:
    """The example's integers, and floats drawn."""
    drawn = draw_all(subject.sources, subject.sizes, 1 + seed)
    return [v if x.example is None or v.is_floating_point() else x.example.clone() for x, v in zip(subject.sources, drawn)]


def _all_take(subject: Subject, call: Call) -> bool:
    """Whether a call's inputs are ones that members answer to."""
    return all(_takes(subject, x) for x in (call.inputs if call.pattern == "each" else call.inputs[:1]))


def _takes(subject: Subject, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether member 0 answers at all. Indices drawn for other sizes (the edges of a graph of fewer nodes) may be none that a member takes."""
    program = subject.programs[subject.signatures[0]]
    weights = subject.weights(0)
    try:
        with torch.inference_mode():
            subject.run(0)(*(weights[s.source] for s in program.weights), *inputs)
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def _large(subject: Subject) -> int:
    """The large batch: enough rows for SAMPLES numbers in the smallest output."""
    least = 6
    drawn = draw_all(subject.sources, {**subject.sizes, subject.batch: least}, 1)
    if not _takes(subject, drawn):
        return subject.sizes[subject.batch]
    wanted = max(least, min(SAMPLES, math.ceil(SAMPLES * least / _smallest(subject, {**subject.sizes, subject.batch: least}))))
    return next((b for b in range(wanted, 0, -1) if subject.fits({**subject.sizes, subject.batch: b})), subject.sizes[subject.batch])


def _smallest(subject: Subject, sizes: Mapping[str, int]) -> int:
    """How many numbers the smallest floating output of a call holds; SAMPLES where none tells."""
    drawn = draw_all(subject.sources, sizes, 1)
    if not _takes(subject, drawn):
        return SAMPLES
    weights = subject.weights(0)
    with torch.inference_mode():
        values = subject.run(0)(*(weights[s.source] for s in subject.programs[subject.signatures[0]].weights), *drawn)
    return min((v.numel() for v in values if isinstance(v, torch.Tensor) and v.numel() and floating(v)), default=SAMPLES)


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
    moved: list[str] = []  # plain attributes in which the modules leave other tensors: no state that an export could see
    captured = [Pool(p.name) for p in pools]
    raised = True
    for i in range(len(subject.members)):
        subject.ask([i])
        raised = _by_program(subject, i, made, found, pools) and raised
        give_back()
        if subject.module is not None:
            _by_module(subject, i, made, found, captured, moved)
            give_back()
        if progress:
            progress(i + 1, len(subject.members))
    coarse = coarsest(subject.programs[subject.signatures[0]])
    in_double = [k for k, eps in enumerate(coarse) if eps == torch.finfo(torch.float64).eps]
    if in_double:
        _rounding_in_double(subject, made, found, pools, in_double)
    if unsteady := next((w for p, eps in zip(pools, coarse) if raised and (w := p.unsteady(eps))), ""):
        if not _repeats(subject, made, found):
            raise VerificationError(
                f"{unsteady}, and change from run to run: nothing can be proved of such a model. Random numbers or state in eval mode do this; make forward deterministic"
            )
        raised = False  # float64 decides otherwise at a threshold (the bucket of a position, the winner of a topk): it is no truth for this model
        for answer in found:
            answer.truth = [[answered(o) for o in own] for own in answer.own]
        owns = {id(own): own for answer in found for own in answer.own}.values()  # one call's answers may stand in two patterns
        for k, pool in enumerate(pools):
            pool.own_square = pool.own_max = pool.scale_square = 0.0
            pool.count = 0
            for own in owns:
                pool.add_own(own[k], answered(own[k]))
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
        member, wrong = pool.first_wrong()
        if wrong:
            if not moved and not _steady(subject, made):
                raise VerificationError(
                    f"{wrong}: {subject.method} gives other answers from run to run, and nothing can be proved of such a model. It draws random numbers (of Python or "
                    "NumPy, which no export sees) or keeps something from one call to the next; make it deterministic, or make what it draws an input"
                )
            raise VerificationError(
                f"the captured program does not give the members' own answers: {wrong}. {_differ(subject, subject.members.index(member))}"
                + (
                    f". {subject.method} leaves another tensor in {', '.join(moved[:5])}, a plain attribute: to carry that from call to call, make it a buffer "
                    f"with register_buffer and build with --state {moved[0]}"
                    if moved
                    else ""
                )
            )
    if subject.alike is not None:
        subject.alike.settle()
    return found, captured, raised


def _by_program(subject: Subject, i: int, made: Sequence[Call], found: Sequence[Answers], pools: Sequence[Pool]) -> bool:
    """Member i's own answers and its float64 ones, put into `found` and the pools.

    Returns: whether there is a float64 truth. Raises: VerificationError where the program fails for this member.
    """
    weights, program = subject.weights(i), subject.programs[subject.signatures[i]]
    given = [weights[s.source] for s in program.weights]
    # Raising all weights once is the faster way, and takes twice a member's memory.
    late = sum(g.nbytes for g in given) > LATE_BYTES
    doubles = given if late else [raise_value(g) for g in given]
    raised = True
    left: list[tuple[list[Any], list[Any]]] = []  # by call: what this member's program and its truth gave
    for call, into in zip(made, found):
        before = left[call.after] if call.after is not None else ([], [])
        same = _answered(made, found, call, i)
        if same is not None:  # the same inputs in another pattern
            into.own.append(same.own[i])
            into.truth.append(same.truth[i])
            left.append(([], []))
            continue
        inputs, exact = (_next(subject, call.inputs[i], b) for b in before)
        with torch.inference_mode():
            try:
                own = list(subject.run(i)(*given, *inputs))
            except (
                RuntimeError,
                IndexError,
                ValueError,
            ) as e:  # member 0 has answered: something in this one's weights (NaN in an eigenvalue problem)
                raise VerificationError(
                    f"member {subject.members[i]} fails at {call.label}, where member {subject.members[0]} answers: {type(e).__name__}: "
                    f"{' '.join(str(e).split())[:300]}; look at its weights, or leave it out"
                ) from e
            try:
                with double_by_default():
                    truth = list(subject.run(i, exact=not late, late=late)(*doubles, *(raise_value(x) for x in exact)))
            except RuntimeError:  # an op that has no float64 kernel: the member's own answer stands for the truth, and the record says so
                truth, raised = [o.to(torch.float64) if o.is_floating_point() else o for o in own], False
        into.own.append(own)
        into.truth.append([t.to(torch.float64) if floating(o) and not t.is_complex() else t for t, o in zip(truth, own)])
        for pool, o, t in zip(pools, own, into.truth[-1]):
            pool.add_own(o, t)
        left.append((own, truth) if subject.states else ([], []))
    return raised


def _by_module(subject: Subject, i: int, made: Sequence[Call], found: Sequence[Answers], captured: Sequence[Pool], moved: list[str]) -> None:
    """Comparison (a) of member i: its own module's answers beside its program's, in the pools `captured`. It is built when the program's weights in float64 are gone.

    moved: gets the plain attributes in which the module leaves other tensors: no state that an export could see. Raises: VerificationError.
    """
    assert subject.module is not None
    module = subject.module(i)
    if subject.alike is not None and subject.alike.see(i, module):
        del module
        module = subject.module(i)
    first = True  # the call in which the module is heard
    left: list[list[Any]] = []  # by call: what the module gave
    for call, into in zip(made, found):
        theirs: list[torch.Tensor] = []
        if call.user and _answered(made, found, call, i) is None:
            held = dict(tensors_of(module))
            inputs = _next(subject, call.inputs[i], left[call.after] if call.after is not None else ())
            theirs = _tensors(subject, i, _own_answer(module, subject, i, inputs, call.label, first), into.own[i])
            first = False
            moved += [n for n, t in tensors_of(module) if held.get(n) is not t and n not in moved]
            for pool, y, o in zip(captured, theirs, into.own[i]):
                pool.add_wide(subject.members[i], call.label, y, o, answered(o))
        left.append(theirs if subject.states else [])


def _rounding_in_double(subject: Subject, made: Sequence[Call], found: Sequence[Answers], pools: Sequence[Pool], outputs: Sequence[int]) -> None:
    """What rounding costs members in float64, whose own answers are the truth: the error of their program in float32, as much smaller as float64 is finer.

    Rounding errors are in proportion to the eps of a dtype. Where float32 decides otherwise (a threshold), or cannot run, nothing is added.
    """
    finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    squares, largest, counts = dict.fromkeys(outputs, 0.0), dict.fromkeys(outputs, 0.0), dict.fromkeys(outputs, 0)
    for i in range(len(subject.members)):
        weights, program = subject.weights(i), subject.programs[subject.signatures[i]]
        given = [single_value(weights[s.source]) for s in program.weights]
        run = graph_module(single_program(program), CPU).forward
        for call, answer in zip(made, found):
            if call.after is not None:
                continue
            try:
                with torch.inference_mode():
                    single = list(run(*given, *(single_value(x) for x in call.inputs[i])))
            except (RuntimeError, IndexError, ValueError):
                return
            for k in outputs:
                own = answer.own[i][k]
                if not floating(own) or single[k].shape != own.shape:
                    continue
                fine = torch.isfinite(own) & torch.isfinite(single[k])
                error = (single[k][fine].to(own.dtype) - own[fine]).abs()
                if error.numel():
                    squares[k] += float(error.square().sum())
                    largest[k] = max(largest[k], float(error.max()))
                    counts[k] += error.numel()
    for k in outputs:
        rms = math.sqrt(squares[k] / counts[k]) if counts[k] else math.inf
        if rms <= 1e-3 * pools[k].scale:
            pools[k].own_square = max(pools[k].own_square, (rms * finer) ** 2 * pools[k].count)
            pools[k].own_max = max(pools[k].own_max, largest[k] * finer)


def coarsest(program: Program) -> list[float]:
    """By output: the largest eps of the floating dtypes that it is computed through. A cast back to float32 brings nothing back.

    What is decided there (a mask, an index) is no rounding: float64 may decide otherwise, and is no truth then.
    """
    found: dict[str, float] = {s.name: _eps(s.type) for s in (*program.weights, *program.inputs)}
    for node in program.nodes:
        decided = node.out.startswith(("int", "uint", "bool"))
        found[node.name] = 0.0 if decided else max([_eps(node.out), *(found[r] for r in refs((node.args, node.kwargs)))])
    return [max((found[r] for r in refs(o.value)), default=0.0) for o in program.outputs]


def _eps(type_: str) -> float:
    """Of a node's type text; 0 for one without rounding, or of several values: each of them is a node too."""
    dtype = type_.partition("[")[0]
    return torch.finfo(dtype_of(dtype)).eps if dtype.startswith(("float", "bfloat", "complex")) else 0.0


def answered(own: torch.Tensor) -> torch.Tensor:
    """A member's own answer where it has to stand for the truth."""
    return own.to(torch.complex128 if own.is_complex() else torch.float64) if floating(own) else own


def _because(subject: Subject, i: int) -> str:
    """In what member i's module differs from the captured one, as the next sentence; empty where nothing tells."""
    return f". {why}" if subject.alike is not None and (why := subject.alike.why(i)) else ""


def _differ(subject: Subject, i: int) -> str:
    """Why member i's own answers may be other than its program's, and the way out."""
    why = _because(subject, i)
    if why:
        what = f": {why[2].lower()}{why[3:]}"
    elif subject.alike is None:
        what = " (a Python number or list drawn in __init__), or the export is wrong"
    else:
        what = " (a number in a global: no plain attribute of the modules tells), or the export is wrong"
    return f"The members differ in something that is no weight{what}; make it a buffer or an argument of the factory"


def _own_answer(module: nn.Module, subject: Subject, i: int, inputs: Sequence[torch.Tensor], label: str, heard: bool) -> list[Any]:
    """What member i's module gives. heard: what it does is recorded. Raises: VerificationError where it fails."""
    try:
        if heard and subject.alike is not None:
            recorded = Recorded()
            try:
                found = run_module(module, subject, inputs, recorded)
            except Exception:  # noqa: BLE001  # what cannot be recorded (an op of the user's that takes no mode) runs without
                subject.alike.hear(i, None)
            else:
                subject.alike.hear(i, recorded.did)
                return found
        return run_module(module, subject, inputs)
    except (MemoryError, WidepackError):
        raise
    except Exception as e:
        raise VerificationError(
            f"member {subject.members[i]}: its own module fails at {label}, where the captured program answers: {type(e).__name__}: "
            f"{' '.join(str(e).split())[:300]}. {_differ(subject, i)}"
        ) from e


def _answered(made: Sequence[Call], found: Sequence[Answers], call: Call, i: int) -> Answers | None:
    """The answers of an earlier call that gave member i the same inputs, if there is one. What carries states is a chain of its own."""
    for other, answer in zip(made, found):
        if other is call or call.carried:
            return None
        if other.label == call.label and all(torch.equal(a, b) for a, b in zip(other.inputs[i], call.inputs[i])):
            return answer
    return None


def _next(subject: Subject, inputs: Sequence[torch.Tensor], before: Sequence[Any]) -> list[torch.Tensor]:
    """The inputs of a call, with the states that the call before it left, if it follows one."""
    given = list(inputs)
    for s in subject.states if before else ():
        given[s.input] = before[s.output]
    return given


def _repeats(subject: Subject, made: Sequence[Call], found: Sequence[Answers]) -> bool:
    """Whether every member's own answers come out again, bit for bit."""
    for i in range(len(subject.members)):
        weights, program = subject.weights(i), subject.programs[subject.signatures[i]]
        run = subject.run(i)
        for call, answer in zip(made, found):
            before = found[call.after].own[i] if call.after is not None else ()
            with torch.inference_mode():
                again = run(*(weights[s.source] for s in program.weights), *_next(subject, call.inputs[i], before))
            if not all(torch.equal(a.nan_to_num(), o.nan_to_num()) for a, o in zip(again, answer.own[i])):
                return False
    return True


def _steady(subject: Subject, made: Sequence[Call]) -> bool:
    """Whether the first member's own module gives one answer to one call, run after run. Only a module with states may do otherwise."""
    call = next((c for c in made if c.user and c.after is None), None)
    if subject.module is None or subject.states or call is None:
        return True
    module, inputs = subject.module(0), call.inputs[0]
    first = [x for x in run_module(module, subject, inputs) if isinstance(x, torch.Tensor)]
    for _ in range(8):  # a coin may fall the same way a few times
        again = [x for x in run_module(module, subject, inputs) if isinstance(x, torch.Tensor)]
        if any(a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again)):
            return False
    return True


def run_module(module: nn.Module, subject: Subject, inputs: Sequence[torch.Tensor], mode: AbstractContextManager[Any] | None = None) -> list[Any]:
    """The user's module on one call, without the nested-tensor path that answers differently at padded positions; buffers are restored.

    mode: what the call runs under.
    Returns: the leaves of what its method returns, then the new values of the states that it leaves in buffers or inputs.
    """
    given = [x.detach().clone() for x in inputs]
    args, kwargs = subject.bind(given)
    before = [(part, n, b, b.clone()) for part in module.modules() for n, b in part._buffers.items() if b is not None]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            owners = {s.name: owner_of(module, s.name) for s in subject.states if s.how == BUFFER}
            for s in subject.states:
                if s.how == BUFFER:
                    part, name = owners[s.name]
                    own = part._buffers[name]
                    assert own is not None  # a state is a tensor from the beginning
                    own.copy_(given[s.input])  # in place: what else holds this tensor sees it, as it does in the user's own calls
            call = module if subject.method == FORWARD else method_of(module, subject.method)
            with mode or nullcontext():
                result = call(*args, **kwargs)
            found = pytree.tree_leaves(known_forms(result))
            for s in sorted(subject.states, key=lambda s: s.output):
                if s.how == BUFFER:
                    part, name = owners[s.name]
                    found.append(part._buffers[name])
                elif s.how == CHANGED:
                    found.append(given[s.input])
            # a parameter may be an output, and a buffer, which is put back below
            found = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in found]
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        with torch.no_grad():
            for part, name, b, value in before:
                part._buffers[name] = b
                b.copy_(value)
    return found


def _tensors(subject: Subject, i: int, found: Sequence[Any], own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of what a module returned; the rest must be what the captured program returns for everybody."""
    member, numbers = subject.members[i], subject.numbers
    theirs = [x for x in found if isinstance(x, torch.Tensor)]
    rest = [x for x in found if x is not None and not isinstance(x, torch.Tensor)]  # fields that are None may be no leaves of the member's own class
    if rest != [x for x in numbers if x is not None]:
        raise VerificationError(
            f"member {member} returns {rest} beside its tensors, the captured program {list(numbers)}: numbers in the result belong to the program and "
            f"must be the same for all members and calls; return them as tensors, or leave them out{_because(subject, i)}"
        )
    if len(theirs) != len(own):
        raise VerificationError(
            f"member {member} gives {len(theirs)} tensors, the captured program {len(own)}; what forward returns must not depend on values{_because(subject, i)}"
        )
    return theirs


def check_wide(
    subject: Subject,
    program: Program,
    weights: Weights,
    pattern: str,
    made: Sequence[Call],
    found: Sequence[Answers],
    checked: Sequence[Pool],
    members: Sequence[int],
) -> None:
    """Comparison (b) of one wide program.

    weights: by source name, `[N, ...]` or shared, or a list of N. members: the numbers of those N. checked: pools of the members' own errors, which get the wide
    answers' beside them; `wrong()` tells. Raises: VerificationError where the program fails.
    """
    run = Executable(program, weights, CPU)
    left: list[list[Any]] = []
    for call, answer in zip(made, found):
        left.append([])
        if call.pattern != pattern:
            continue
        try:
            wide = run.run(*_next(subject, call.stacked(members), left[call.after] if call.after is not None else ()))
        except (RuntimeError, IndexError, ValueError) as e:
            raise VerificationError(
                f"the wide program ({pattern}) fails at {call.label}, where every member answers: {type(e).__name__}: {' '.join(str(e).split())[:300]}. "
                "Please report it, or build with --strategy loop"
            ) from e
        for s in subject.states:
            left[-1] = left[-1] or list(wide)
            if program.outputs[s.output].kind == "shared":
                left[-1][s.output] = wide[s.output].unsqueeze(0).expand(len(members), *wide[s.output].shape)
        for k, pool in enumerate(checked):
            for at, i in enumerate(members):
                part = wide[k] if program.outputs[k].kind == "shared" else wide[k][at]
                pool.add_wide(subject.members[i], call.label, part, answer.own[i][k], answer.truth[i][k])


def widen(pools: Sequence[Pool]) -> None:
    """Without a float64 truth, float32 against float32 is held to 1e-5 of the scale."""
    for pool in pools:
        pool.own_max, pool.own_square = max(pool.own_max, 1e-5 * pool.scale), max(pool.own_square, (1e-5 * pool.scale) ** 2 * pool.count)


def bisect(subject: Subject, simplified: Sequence[Program], lowered: Lowered, weights: Weights, call: Call, members: Sequence[int]) -> str:
    """The first node of the member program whose wide value is wrong, in words; empty when every value that can be compared is right. members: those of the wide program."""
    wide = values_of(lowered.program, weights, call.stacked(members))
    pools: dict[str, Pool] = {}
    parts: dict[str, list[Any]] = {}
    for place, i in enumerate(members):
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
                part = wide[at] if kind == "shared" else wide[at][place]
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


def of_bits(program: Program) -> str:
    """What to say of a wrong answer where whole numbers are read out of the bits of floats; empty where none are."""
    found = next((n for n in program.nodes if n.op == "aten.view.dtype" and n.out.startswith(("int", "uint"))), None)
    if found is None:
        return ""
    return (
        f". Whole numbers are read out of the bits of floats ({found.name}{f', from {found.source}' if found.source else ''}): they are others where a last bit rounds "
        "otherwise, as it may for N members at once; give the floats themselves out, or compare and round them as floats"
    )


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

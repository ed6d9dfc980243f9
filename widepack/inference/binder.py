"""Calls of a wide model: inputs bound to the forward's parameters and checked before anything runs.

Checked, in this order: names, kinds of values, dtype, device, layout, the member axis where an input is one a member, rank, static sizes, named dims (equal letters,
bounds), guards. Each refusal is one sentence that names both sides. Integer values are not looked at: an index out of range is refused by the op itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.manifest import Entry
from widepack_artifacts.tree import Tree, leaves

from ..ir.encoding import dtype_of
from ..errors import InputError, UsageError
from ..spec.input_spec import DimExpr, parse_type


class Each:
    """Marks an input that holds one value a member, `[N, ...]`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"widepack.each({self.value!r})"


def each(value: Any) -> Each:
    """Mark an input as one a member: `ens(x, h=widepack.each(h))`. value: `[N, ...]`, or a list of N tensors of one shape."""
    return Each(value)


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One tensor of a call. said: its name in messages, `input x`. dims: numbers and dim expressions of the member's own shape."""

    name: str
    said: str
    dtype: torch.dtype
    dims: tuple[int | DimExpr, ...]
    text: str


class Binder:
    """Binds and checks calls of one entry.

    members: N of the loaded model. device: where inputs must be. stacked: whether a state is one a member, `[N, ...]`, and not that of a single one.
    states: input, output and name of each state; names of all entries' are known.
    """

    def __init__(self, entry: Entry, members: int, device: torch.device, *, stacked: bool = True, known: Collection[str] = ()) -> None:
        self.members = members
        self.device = device
        self.stacked = stacked
        self.states = [(s.input, s.output, entry.inputs[s.input].name) for s in entry.state]
        self.carried = {i for i, _, _ in self.states}
        self.known = {*known, *(name for _, _, name in self.states)}
        self.leaves = [
            LeafSpec(i.name, f"{'state' if k in self.carried else 'input'} {i.name}", dtype_of(parse_type(i.type)[0]), parse_type(i.type)[1], i.type)
            for k, i in enumerate(entry.inputs)
        ]
        self.parameters = [p for p in entry.signature if not self.carried & set(leaves(p.tree))]
        self.names = [p.name for p in self.parameters]
        self.positions = [p.name for p in self.parameters if p.kind == "positional"]
        self.takes = ", ".join(p.name for p in self.parameters if not p.default)
        self.dims = {d: (v.min, v.max, v.source) for d, v in entry.dims.items()}
        self.guards = [(g.expr, g.source) for g in entry.guards]
        self.fixed = list(entry.fixed)
        self.none = (False,) * len(self.leaves)
        self.all = (True,) * len(self.leaves)
        self._plain = self._count_plain()

    def _count_plain(self) -> int:
        """How many tensors in a row are a whole call, leaf by leaf; -1 where a call needs more than tensors by position."""
        leading = [p for p in self.parameters if p.kind == "positional" and "leaf" in p.tree]
        in_order = [p.tree["leaf"] for p in leading] == list(range(len(self.leaves))) and self.parameters[: len(leading)] == leading
        return len(leading) if in_order and not self.states and all(p.default for p in self.parameters[len(leading) :]) else -1

    def plain(self, args: Sequence[Any]) -> bool:
        """Whether these arguments are the call's tensors as they stand, so that `bind` has nothing to do."""
        if len(args) != self._plain:
            return False
        for value in args:  # noqa: SIM110  a generator costs as much as the rest of the call
            if type(value) is not torch.Tensor:
                return False
        return True

    @property
    def takes_in(self) -> str:
        """`inputs x=float32[B,8]; state h=float32[B,16]`."""
        groups = ("inputs", [i for i in range(len(self.leaves)) if i not in self.carried]), ("state", sorted(self.carried))
        return "; ".join(f"{what} {', '.join(f'{self.leaves[i].name}={self.leaves[i].text}' for i in group)}" for what, group in groups if group)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[bool]]:
        """The call's tensors, leaf by leaf, and which of them hold one value a member. Raises: InputError."""
        if len(args) > len(self.positions):
            raise InputError(f"the model takes {len(self.positions)} inputs by position ({', '.join(self.positions)}), the call gives {len(args)}")
        given = dict(zip(self.positions, args))
        for name, value in kwargs.items():
            if name not in self.names:
                raise InputError(f"the model has no input {name!r}; its inputs are {', '.join(self.names)}")
            if name in given:
                raise InputError(f"input {name} is given twice, by position and by name")
            given[name] = value
        values: list[Any] = [None] * len(self.leaves)
        marks = [False] * len(self.leaves)
        for name, _, tree, default in self.parameters:
            if name in given:
                value = given[name]
                own = isinstance(value, Each)
                self._leaves(tree, value.value if isinstance(value, Each) else value, name, own, values, marks)
            elif not default:
                built = f"; it was built with {tree['const']!r}, which is not forward's default" if "const" in tree else ""
                raise InputError(f"input {name} is missing; the model takes {self.takes}{built}")
        return values, marks

    def carry(self, values: list[Any], marks: list[bool], state: Any) -> None:
        """Put the states into a call's tensors. state: {name: tensor}, as `state()` or the last call gave it. Raises: InputError."""
        names = ", ".join(name for _, _, name in self.states)
        if not isinstance(state, Mapping):
            raise InputError(
                f"{'state is missing' if state is None else f'state is {_a(state)}'}; this model carries {names} from call to call: "
                f"start with state = ens.state(), and go on with y, state = ens(x, state=state)"
            )
        if unknown := [str(k) for k in state if k not in self.known]:
            raise InputError(f"state has {', '.join(unknown)}, which the model does not carry; it carries {', '.join(sorted(self.known))}")
        for i, _, name in self.states:
            if name not in state:
                raise InputError(f"state lacks {name}; the model carries {names}: state() gives them as they begin")
            if not isinstance(state[name], torch.Tensor):
                raise InputError(
                    f"state {name} is {_a(state[name])}; the model carries a tensor {self.leaves[i].text}{', one a member' if self.stacked else ''}"
                )
            values[i], marks[i] = state[name], self.stacked

    def fresh(self, initial: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """States as they begin: a buffer as the member has it, an input as zeros. initial: buffers by name. Raises: UsageError for a dim without a size."""
        made = {}
        for i, _, name in self.states:
            leaf = self.leaves[i]
            if name in initial:
                made[name] = initial[name].clone(memory_format=torch.contiguous_format)
                continue
            missing = [d.letter for d in leaf.dims if not isinstance(d, int) and d.letter not in sizes]
            if missing:
                given = ", ".join(f"{d}={self.dims[d][0] + 1}" for d in dict.fromkeys(missing))
                raise UsageError(f"state {name} is {leaf.text}, and its size depends on {', '.join(missing)}: give it, for example state({given})")
            own = [d if isinstance(d, int) else d.factor * sizes[d.letter] for d in leaf.dims]
            made[name] = torch.zeros([self.members, *own] if self.stacked else own, dtype=leaf.dtype, device=self.device)
        return made

    def _leaves(self, tree: Tree, value: Any, name: str, own: bool, values: list[Any], marks: list[bool]) -> None:
        ((form, inner),) = tree.items()
        if form == "leaf":
            if isinstance(value, Each):
                value, own = value.value, True
            if own and isinstance(value, (list, tuple)):
                if len(value) != self.members or not all(isinstance(v, torch.Tensor) and v.shape == value[0].shape for v in value):
                    raise InputError(
                        f"input {name}: one a member needs {self.members} tensors of one shape, or one tensor [{self.members}, ...]; got {_a(value)}"
                    )
                value = torch.stack(list(value))
            if not isinstance(value, torch.Tensor):
                raise InputError(f"input {name} is {_a(value)}; the model takes a tensor {self.leaves[inner].text}")
            values[inner], marks[inner] = value, own
        elif form == "const":
            if not (value is None or isinstance(value, (bool, int, float, str))):
                raise InputError(
                    f"input {name} is {_a(value)}; the model was built with {inner!r} there, which is part of its program. Build another artifact for other values"
                )
            if value != inner:
                raise InputError(
                    f"input {name} is {value!r}; the model was built with {inner!r} there, which is part of its program. Build another artifact for other values"
                )
        elif form in ("tuple", "list"):
            if not isinstance(value, (list, tuple)) or len(value) != len(inner):
                raise InputError(f"input {name} needs a {form} of {len(inner)}; got {_a(value)}")
            for i, (t, v) in enumerate(zip(inner, value)):
                self._leaves(t, v, f"{name}.{i}", own, values, marks)
        else:
            keys = [k for k, _ in inner]
            if not isinstance(value, Mapping) or set(value) != set(keys):
                raise InputError(f"input {name} needs a dict with the keys {', '.join(map(str, keys))}; got {_a(value)}")
            for k, t in inner:
                self._leaves(t, value[k], f"{name}.{k}", own, values, marks)

    def _fixed(self, name: str, size: int, axis: int) -> str:
        """The member's line that fixes a size, where the build found one."""
        start = f"{name} has {size} at axis {axis} ("
        return next((f"; {line}" for line in (s.partition("), ")[2] for s in self.fixed if s.startswith(start)) if line), "")

    def check(self, values: Sequence[torch.Tensor], marks: Sequence[bool]) -> dict[str, int]:
        """Hold a call's tensors to the entry. Returns: the size of each named dim. Raises: InputError."""
        sizes: dict[str, int] = {}
        from_: dict[str, str] = {}
        for leaf, value, own in zip(self.leaves, values, marks):
            if value.dtype != leaf.dtype:
                raise InputError(
                    f"{leaf.said} is {_short(value.dtype)}, the model takes {_short(leaf.dtype)} ({leaf.text}); convert it with .to(torch.{_short(leaf.dtype)})"
                )
            if value.device != self.device:
                raise InputError(
                    f"{leaf.said} is on {value.device}, the model on {self.device}; move it with .to({str(self.device)!r}), or load(..., device={str(value.device)!r})"
                )
            if value.layout != torch.strided:
                raise InputError(f"{leaf.said} is {_short(value.layout)}, the model takes a dense tensor ({leaf.text}); convert it with .to_dense()")
            shape = value.shape
            if own:
                if not shape or shape[0] != self.members:
                    raise InputError(
                        f"{leaf.said} has shape {list(shape)}; one a member means a first axis of {self.members} members, [{self.members}, {leaf.text[leaf.text.index('[') + 1 :]}"
                    )
                shape = shape[1:]
            if len(shape) != len(leaf.dims):
                hint = "; for one input a member call ens.each" if not own and len(shape) == len(leaf.dims) + 1 else ""
                raise InputError(f"{leaf.said} has {len(shape)} dims, {list(shape)}; the model takes {leaf.text}, {len(leaf.dims)} dims{hint}")
            for axis, (size, dim) in enumerate(zip(shape, leaf.dims)):
                if isinstance(dim, int):
                    if size != dim:
                        raise InputError(
                            f"{leaf.said} has {size} at axis {axis}, {list(shape)}; the model takes {dim} there, {leaf.text}{self._fixed(leaf.name, dim, axis)}"
                        )
                    continue
                if size % dim.factor:
                    raise InputError(f"{leaf.said} has {size} at axis {axis}; the model takes {dim}, a multiple of {dim.factor}")
                got = size // dim.factor
                if sizes.setdefault(dim.letter, got) != got:
                    raise InputError(
                        f"{leaf.said} has {dim.letter} = {got} at axis {axis}, but {from_[dim.letter]} has {dim.letter} = {sizes[dim.letter]}; equal letters are equal sizes"
                    )
                from_.setdefault(dim.letter, leaf.said)
        for letter, (least, most, source) in self.dims.items():
            if letter in sizes and not (least <= sizes[letter] and (most is None or sizes[letter] <= most)):
                bound = f"{least} <= {letter}" + ("" if most is None else f" <= {most}")
                raise InputError(f"{letter} = {sizes[letter]} ({from_[letter]}); the model holds for {bound}{_source(source)}")
        for expr, source in self.guards:
            if not guard_forms.holds(expr, sizes):
                raise InputError(
                    f"the model was captured under the condition {guard_forms.text(expr)}, and this call has {', '.join(f'{d} = {s}' for d, s in sizes.items())}{_source(source)}; "
                    f"its program is not known to hold there. Build an artifact with a sample of such sizes"
                )
        return sizes


def _a(value: Any) -> str:
    """What was given, for messages: `a tuple of 2`, `a dict with the keys a, b`, `a Tensor`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    count = (
        f" of {len(value)}"
        if isinstance(value, (list, tuple))
        else f" with the keys {', '.join(map(str, value))}"
        if isinstance(value, Mapping)
        else ""
    )
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{count}"


def _short(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).split(".")[1]


def _source(source: str) -> str:
    return f" ({source})" if " " in source.partition(":")[0] else f" (from {source})" if source else ""


Runner = Callable[..., Any]

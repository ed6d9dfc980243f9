"""`Fused`: N live members as one nn.Module that trains. Made by `widepack.fuse`.

Its parameters are the members', stacked: `[N, *shape]` under the member's own names, so that optimizers, `state_dict`, `.to`, hooks and clipping work as ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._compile import _disable_dynamo

from .attribute_reads import Reads, reads
from ..capture.call import Call
from ..ir.encoding import dtype_name
from ..capture.guards import Leaf
from ..spec.dropout import switched_on
from ..errors import InputError, UsageError
from .programs import CPU, Entry, Runner, captured_of, constants_of
from .skeleton import Hollow, weights_of
from ..inference.binder import Each
from ..checkpoints.alignment import bit_equal
from ..inference.output import present
from .channel_packing import pack
from .same_members import refuse_gradients, refuse_programs
from ..spec.input_spec import DimExpr
from .stacked_parameters import Row, filled, place_of
from ..inference.entry import holds_tensor

if TYPE_CHECKING:
    from ..building.build import BuildReport
    from ..capture.capture import Captured


@dataclass
class Made:
    """What a fused module was made of, beside weights.

    hollows: the members' modules without their weights. rows: of the weights. call: the sample. dynamic: its dims, where the user named them. strategies: of the
    lowering. dropout: whether it is on in eval mode. packed: whether calls are channel-packed. check: compares a fresh program with the members alone, or None. settle: asks members
    where a fresh capture holds.
    """

    hollows: Sequence[Hollow]
    rows: Sequence[Row]
    call: Call
    dynamic: Mapping[str, Any] | None
    strategies: str | Sequence[str]
    dropout: bool
    packed: bool
    check: Callable[[Fused, Entry, Runner], None] | None
    settle: Callable[[Fused, Entry], None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Made:
        """Nothing of it changes, so copies of the module have it together."""
        return self


class Fused(nn.Module):
    """N members in one module; called as a member is, answering with a member axis: each leaf `[N, *the member's shape]`.

    `fused(x)`: all members see x. `fused.each(xs)`: member i sees xs[i]. `fused(x, h=widepack.each(h))`: mixed. In eval mode without gradients it runs what
    `widepack.load` would; in train mode, or where gradients are asked for, a program that is differentiated, each member's gradients being its own. Modes are the
    parts' own: `fused.norm.eval()` holds one layer's statistics still.
    """

    _made: Made
    _entries: dict[Any, Entry]
    _places: dict[str, tuple[dict[str, Any], str]]  # of the weights, by name
    _parts: dict[str, nn.Module]
    if TYPE_CHECKING:  # what has the members' names is a part, a parameter or a buffer

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.__dict__["_made"] = made
        self.__dict__["_entries"] = {}
        self.__dict__["_places"] = {}
        self.__dict__["_parts"] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        """A module of its own over the same programs."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """All but the programs, which are made anew."""
        return {**self.__dict__, "_entries": {}}

    def __len__(self) -> int:
        return len(self._made.hollows)

    def __bool__(self) -> bool:
        return True

    def _get_name(self) -> str:
        return f"Fused{len(self)}{type(self._made.hollows[0].module).__name__}"

    # ---------------------------------------------------------------- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Every member sees the same inputs, but for those marked with `widepack.each`.

        Inputs: as the member's forward takes them. Returns: the member's structure, every leaf `[N, *the member's shape]` (a list of N where shapes differ). In train
        mode the buffers that members change (statistics) are changed, each member's own. A packed module takes `[B, N*C, ...]` (or `[B, C, ...]` for all) and gives `[B, N*C, ...]`. Raises: InputError before anything runs; CaptureError, LoweringError at
        the first call in a mode.
        """
        entry = self._entry()
        values, marks = entry.binder.bind(args, kwargs)
        if not self._made.packed:
            return self._answer(entry, values, marks)
        for k, leaf in enumerate(entry.binder.leaves):
            values[k], marks[k] = unpacked(leaf.said, values[k], leaf.dims, marks[k], len(self))
        return pytree.tree_map(lambda y: pack(y) if isinstance(y, torch.Tensor) else y, self._answer(entry, values, marks))

    def each(self, *args: Any, **kwargs: Any) -> Any:
        """Member i sees `[i]` of every input. Inputs: `[N, ...]`, or lists of N tensors. Returns and raises: as a call. Hooks of the module run too."""
        return self(*map(_marked, args), **{k: _marked(v) for k, v in kwargs.items()})

    def _answer(self, entry: Entry, values: Sequence[torch.Tensor], marks: Sequence[bool]) -> Any:
        sizes = entry.binder.check(values, marks)
        weights = self.tensors_of(entry)
        asked = torch.is_grad_enabled() and any(t.requires_grad for t in (*weights.values(), *values))
        runner = self._runner(entry, marks, sizes, asked)
        buffers = [self.tensor_of(name) for _, _, name in entry.carried]
        found = runner.run(weights, [*values, *(b.clone() for b in buffers)])
        answer = present(found, runner.program.outputs, len(self), entry.result)
        with torch.no_grad():
            for buffer, (_, output, _) in zip(buffers, entry.carried):
                buffer.copy_(found[output])
        return answer

    def tensor_of(self, name: str) -> torch.Tensor:
        """A parameter or buffer by the members' name: `[N, *shape]`, or `[*shape]` where it is shared."""
        if name not in self._places:
            self._places[name] = place_of(self, name)
        held, last = self._places[name]
        value: torch.Tensor = held[last]
        return value

    def tensors_of(self, entry: Entry) -> dict[str, torch.Tensor]:
        """What the entry's programs read, by name."""
        return {s.source: entry.constants[s.source] if s.source in entry.constants else self.tensor_of(s.source) for s in entry.programs[0].weights}

    # ---------------------------------------------------------------- programs

    def prepare(self) -> None:
        """Make the program of the mode that the module is in, instead of at the first call. Raises: CaptureError, MemberMismatch, VerificationError."""
        entry = self._entry()
        self._runner(entry, [False] * entry.given, entry.sizes, False)

    @_disable_dynamo  # as torch.compiler.disable, which imports the compiler: programs are made and compared outside of a graph
    def _runner(self, entry: Entry, marks: Sequence[bool], sizes: Mapping[str, int], gradients: bool) -> Runner:
        """What runs a call of these inputs; compared with the members alone when it is made."""
        runner = entry.runner(marks, sizes, gradients or any(self._modes()))
        if runner.gradients and not runner.checked:
            refuse_gradients(self._made.hollows[0].module, {n for n, p in self.named_parameters(remove_duplicate=False) if p.requires_grad})
        if not runner.checked and self._made.check is not None:
            with torch.inference_mode(False), plain_dtypes(entry.device):
                self._made.check(self, entry, runner)
        runner.checked = True
        return runner

    @_disable_dynamo
    def _entry(self) -> Entry:
        """The programs of the mode, dtypes and device that the module is in; captured when they are first asked for."""
        made = self._made
        held = {r.name: self.tensor_of(r.name) for r in made.rows}
        devices = {v.device for v in held.values()} or {made.call.leaves[0].example.device if made.call.leaves else CPU}
        if len(devices) > 1:
            raise UsageError(f"the weights of a fused module lie on {', '.join(map(str, devices))}; move all of them to one device with .to()")
        (device,) = devices
        key = (self._modes(), tuple(v.dtype for v in held.values()), device)
        if key not in self._entries:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                plain_dtypes(device),
            ):  # as a program that trains is captured, whatever this call is in
                entry = self._captured(held, device)
                made.settle(self, entry)
                self._entries[key] = entry
        return self._entries[key]

    def _modes(self) -> tuple[bool, ...]:
        """Of every part whether it is in train mode."""
        if not self._parts:
            self._parts.update(self.named_modules())
        return tuple([part.training for part in self._parts.values()])

    def _captured(self, held: Mapping[str, torch.Tensor], device: torch.device) -> Entry:
        """Raises: CaptureError; MemberMismatch for members that are other programs in this mode."""
        made = self._made

        def capture(i: int) -> tuple[Captured, Reads]:
            def fresh() -> nn.Module:
                member = self.member(i, CPU)
                return read.of(switched_on(member) if made.dropout else member)

            with reads() as read:
                return captured_of(fresh, call, made.dynamic is not None, made.dropout), read

        call = self.sample()
        first, read = capture(0)
        refuse_programs(made.hollows, (first, read), capture, "train" if any(self._modes()) else "eval")
        rows = {name: r for r in made.rows for name in (r.name, *r.aliases)}
        constants = constants_of(first, {n: r.name for n, r in rows.items()}, [h.own_tensors() for h in made.hollows])
        kinds = {**{n: r.kind for n, r in rows.items()}, **{n: kind for n, (kind, _) in constants.items()}}
        shared = [s.name for s in first.states if rows[s.name].kind == "shared"]
        if shared:
            raise UsageError(
                f"{', '.join(shared)} would change in this mode, and is one buffer for all {len(self)} passes of one checkpoint; keep these layers in eval mode, "
                "or fuse N copies of the model instead"
            )
        values = {n: v.to(device) for n, (_, v) in constants.items()}
        return Entry(first, kinds, {n: r.name for n, r in rows.items()}, values, len(self), device, made.strategies)

    def sample(self) -> Call:
        """The sample on the CPU, in the dtype that the weights have now, where that is another than they were captured with."""
        made = self._made
        now = {r.name: self.tensor_of(r.name).dtype for r in made.rows}
        before = {name: value.dtype for name, value in weights_of(made.hollows[0].module).items()}
        to = {before[n]: d for n, d in now.items() if before[n] != d}

        def moved(value: Any) -> Any:
            return value.detach().to(CPU, to.get(value.dtype, value.dtype)) if isinstance(value, torch.Tensor) else value

        args, kwargs = pytree.tree_map(moved, (made.call.args, made.call.kwargs))
        leaves = [_leaf(leaf, moved(leaf.example)) for leaf in made.call.leaves]
        return replace(made.call, args=args, kwargs=kwargs, leaves=tuple(leaves))

    @property
    def draws(self) -> bool:
        """Whether members draw random numbers in the mode that the module is in."""
        return self._entry().random

    @property
    def alone_rests(self) -> bool:
        """Whether members alone, in the mode that the module is in, do not drop out where the module does."""
        return self._made.dropout and not any(self._modes())

    def train(self, mode: bool = True) -> Fused:
        self.forget()
        super().train(mode)
        return self

    def forget(self) -> None:
        """Let go of what was made of weights in eval mode: the next call makes it again. Only a write that torch does not count, through `.data`, needs it."""
        for entry in self._entries.values():
            entry.forget()

    # ---------------------------------------------------------------- members

    def member(self, i: int, device: torch.device | str | None = None) -> nn.Module:
        """Member i as a module of its own class: a copy, with weights as they are now, in the mode that the fused module is in. Raises: UsageError."""
        made = self._made
        i = self._number(i)
        return filled(self, made.hollows[i], made.rows, i, torch.device(device) if device is not None else None)

    def _number(self, i: int) -> int:
        """A member's number, counted from 0. Raises: UsageError."""
        if not isinstance(i, int) or not -len(self) <= i < len(self):
            raise UsageError(f"there is no member {i!r}; there are {len(self)}, counted from 0")
        return i % len(self)

    def unfuse(self) -> list[nn.Module]:
        """N modules of the members' own class, with weights and buffers as they are now, bit for bit; copies: nothing is tied to the fused module."""
        return [self.member(i) for i in range(len(self))]

    def copy_(self, to: int, source: int) -> Fused:
        """Copy member `source` over member `to`: its parameters and buffers, in place. An optimizer's own state of member `to` is left as it is. Raises: UsageError."""
        made, to, source = self._made, self._number(to), self._number(source)
        other = [n for e in self._entries.values() for n, v in e.constants.items() if e.kinds[n] == "stacked" and not bit_equal(v[to], v[source])]
        if other:
            raise UsageError(
                f"members {to} and {source} differ in {', '.join(dict.fromkeys(other))}, plain attributes that are no weights and are not copied; make them buffers"
            )
        with torch.no_grad():
            for row in made.rows:
                if row.kind == "stacked":
                    value = self.tensor_of(row.name)
                    value[to].copy_(value[source])
        return self

    def save(self, path: str | PathLike[str], *, names: Sequence[str] | None = None, force: bool = False, pt2: bool = True) -> BuildReport:
        """Write the members, as they are now, as an artifact that `widepack.load` opens: in eval mode, verified as every build.

        With dropout on the artifact's is on too, as `build(..., dropout="on")` makes it; N passes of one model keep its weights once.
        names: the members'; by default 0, 1, ... force, pt2: as `build` takes them. Raises: what `build` raises.
        """
        from .save import save  # all that a build needs

        made = self._made
        call, count = self.sample(), len(self)
        passes = count > 1 and all(h is made.hollows[0] for h in made.hollows)  # of one model
        drops = {"dropout": "on" if made.dropout else "off", "n": count if passes else None}
        options: dict[str, Any] = {"dynamic": made.dynamic, "strategy": made.strategies, "force": force, "pt2": pt2, **drops}
        members = [self.member(i, CPU) for i in range(1 if passes else count)]
        kind = type(members[0]).__qualname__
        given = {"sample": call.args, "sample_kwargs": call.kwargs, **options}
        return save(Path(path), kind, members, lambda i: self.member(i, CPU), names or [str(i) for i in range(count)], **given)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.member(i) for i in range(len(self)))


@contextmanager
def plain_dtypes(device: torch.device) -> Iterator[None]:
    """No autocast, whatever the caller is in: a program is captured and compared in the dtypes that it is written in."""
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        yield


def unpacked(said: str, value: torch.Tensor, dims: Sequence[int | DimExpr], own: bool, members: int) -> tuple[torch.Tensor, bool]:
    """An input of a packed call as one a member, or as it is where all members share it. said: its name. dims: the member's own. Raises: InputError."""
    if own or len(dims) < 2 or value.ndim != len(dims):
        return value, own
    channels = dims[1]
    if value.shape[1] == channels and members > 1:
        return value, False
    if value.shape[1] % members or (isinstance(channels, int) and value.shape[1] != members * channels):
        raise InputError(
            f"{said} has {value.shape[1]} channels at axis 1, {list(value.shape)}; a packed call takes {members} members' {channels} side by side, {members}*{channels}, "
            f"or {channels} for all of them"
        )
    return value.reshape(value.shape[0], members, -1, *value.shape[2:]).movedim(1, 0), True  # a view


def _marked(value: Any) -> Any:
    """An input with a mark that its tensors are one a member."""
    return Each(value) if holds_tensor(value) else value


def _leaf(leaf: Leaf, example: torch.Tensor) -> Leaf:
    """A leaf of the call with another example."""
    return replace(leaf, example=example, type=f"{dtype_name(example.dtype)}[{leaf.type.partition('[')[2]}")

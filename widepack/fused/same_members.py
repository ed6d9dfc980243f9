"""Whether live modules are members of one fused model: of one architecture, dtype, device and mode, and one program up to their weights.

What can be seen without running anything is compared here (`refuse_others`); plain attributes that differ (an eps, a stride, a flag) may change the program or
not, and only captures tell (`refuse_programs`). All differences stand in one error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..verification.same_program import difference
from .attribute_reads import Reads
from ..capture.attributes import Difference, attributes_of, differences, in_words
from ..capture.capture import Captured
from ..ir.encoding import dtype_name
from ..errors import CaptureError, MemberMismatch, UsageError
from .skeleton import Hollow, first_names, weights_of

MOST = 400  # differences that one error lists
WAY_OUT = "Members of one module differ in the values of their weights alone"


def refuse_others(models: Sequence[nn.Module], who: str = "", options: bool = False) -> None:
    """who: said first in the error. options: plain attributes have to be equal too.

    Raises: MemberMismatch for members that are not what the first is; UsageError for weights that are not there yet, or not dense.
    """
    own = attributes_of(models[0])
    for i, model in enumerate(models):
        for name, value in weights_of(model).items():
            if is_lazy(value):
                raise UsageError(f"member {i}: {name} has no size yet; run a lazy module once, on an example, before it is fused")
            if value.layout is not torch.strided or type(value) not in (nn.Parameter, nn.Buffer, torch.Tensor):
                raise UsageError(f"member {i}: {name} is a {type(value).__name__} of layout {value.layout}; fuse stacks plain dense tensors alone")
    found: list[tuple[int, str]] = []
    for i, model in enumerate(models[1:], 1):
        words = [*_differences(models[0], model)]
        if options or words:  # with another difference it is refused anyway, and then for all that it has
            all_ = differences(own, attributes_of(model))
            left = all_ if options else _beside(all_, models[0], model)
            words += [f"{d.path} is {d.other or 'not there'}, in member 0 {d.one or 'not there'}" for d in left]
        found += [(i, w) for w in words]
    if found:
        raise MemberMismatch(f"{who}{': ' if who else ''}{_numbered('the members differ from member 0', _of_members(found))}. {WAY_OUT}")


def _beside(found: Sequence[Difference], one: nn.Module, other: nn.Module) -> list[Difference]:
    """The attributes of those parts which are of one class in both members, and whose weights are of the same shapes: those of others follow from what is said of them."""
    parts, others = (dict(m.named_modules(remove_duplicate=False)) for m in (one, other))
    alike = {n for n in parts if n in others and _same_class(type(parts[n]), type(others[n])) and _shapes(parts[n]) == _shapes(others[n])}

    def owner(path: str) -> str:
        while path and path not in parts and path not in others:
            path = path.rpartition(".")[0]
        return path

    return [d for d in found if owner(d.path) in alike]


def _shapes(part: nn.Module) -> dict[str, torch.Size | None]:
    return {n: None if v is None else v.shape for n, v in (*part._parameters.items(), *part._buffers.items())}


def _of_members(found: Sequence[tuple[int, str]]) -> list[str]:
    """`member 1: ...`; what holds for several once, `members 1, 3-9: ...`. found: (member, words), by member."""
    members: dict[str, list[int]] = {}
    for i, words in found:
        members.setdefault(words, []).append(i)
    return [f"member{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}: {words}" for words, numbers in members.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """`1, 3-9`. numbers: ascending."""
    runs: list[list[int]] = []
    for k in numbers:
        if runs and runs[-1][-1] == k - 1:
            runs[-1] = [runs[-1][0], k]
        else:
            runs.append([k])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _numbered(what: str, found: Sequence[str]) -> str:
    """`what: (1) ...; (2) ...`."""
    rows = "; ".join(f"({k}) {words}" for k, words in enumerate(found[:MOST], 1))
    return f"{what}: {rows}" + (f"; and {len(found) - MOST} more" if len(found) > MOST else "")


def _differences(one: nn.Module, other: nn.Module) -> Iterator[str]:
    """In what a member is not what the first is, as far as its modules and weights tell."""
    parts, others = (dict(m.named_modules(remove_duplicate=False)) for m in (one, other))
    for name in dict.fromkeys([*parts, *others]):
        said, a, b = name or "it", parts.get(name), others.get(name)
        if a is None or b is None or not _same_class(type(a), type(b)):
            again = ": the class was defined again between them; make all members of one" if _kind(a) == _kind(b) else ""
            yield f"{said} is {_kind(b)}, in member 0 {'another class of this name' if again else _kind(a)}{again}"
        elif (modes := (a.training, b.training))[0] != modes[1] and not (name and _modes(parts, others, name.rpartition(".")[0]) == modes):
            yield f"{said} is in {_mode(b)} mode, in member 0 in {_mode(a)} mode"
    held, theirs = weights_of(one), weights_of(other)
    ties, other_ties = first_names(held), first_names(theirs)
    for name in dict.fromkeys([*held, *theirs]):
        a_, b_ = held.get(name), theirs.get(name)
        if a_ is None or b_ is None:
            yield f"{name} is {_weight(b_)}, in member 0 {_weight(a_)}"
            continue
        if (a_.shape, a_.dtype, a_.device) != (b_.shape, b_.dtype, b_.device):
            yield f"{name} is {_weight(b_)}, in member 0 {_weight(a_)}"
        if a_.requires_grad != b_.requires_grad or isinstance(a_, nn.Parameter) != isinstance(b_, nn.Parameter):
            yield f"{name} is {_trains(b_)}, in member 0 {_trains(a_)}"
        if ties[name] != other_ties[name]:
            yield f"{name} is {_tie(name, other_ties)}, in member 0 {_tie(name, ties)}"


def _same_class(one: type, other: type) -> bool:
    """Whether two modules are of one class; torch makes a new one of the same name for every module that it parametrizes."""
    made = nn.utils.parametrize.__name__
    return one is other or (one.__module__ == other.__module__ == made and one.__bases__ == other.__bases__)


def _modes(parts: Mapping[str, nn.Module], others: Mapping[str, nn.Module], name: str) -> tuple[bool, bool] | None:
    """Of a part in both members whether it is in train mode: what is in it is then said with it."""
    return (parts[name].training, others[name].training) if name in parts and name in others else None


def _kind(module: nn.Module | None) -> str:
    return "not there" if module is None else f"a {type(module).__module__}.{type(module).__qualname__}"


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def _weight(value: torch.Tensor | None) -> str:
    return "not there" if value is None else f"{dtype_name(value.dtype)}{list(value.shape)} on {value.device}"


def _trains(value: torch.Tensor) -> str:
    return "a buffer" if not isinstance(value, nn.Parameter) else "a parameter that trains" if value.requires_grad else "a parameter that is frozen"


def _tie(name: str, ties: dict[str, str]) -> str:
    return "a tensor of its own" if ties[name] == name else f"the same tensor as {ties[name]}"


def refuse_programs(hollows: Sequence[Hollow], first: tuple[Captured, Reads], again: Callable[[int], tuple[Captured, Reads]], mode: str) -> None:
    """Refuse members that are other programs than the first, where their plain attributes differ from its.

    Each is captured, unless it has the values that a captured one read, whose program it has then. first: the capture of member 0, and what it read. again: those of another.
    mode: in words. Raises: MemberMismatch with all of them.
    """
    own = attributes_of(hollows[0].module)
    known = [(first[1], first[1].texts(hollows[0].module), "")]  # what was read, what was there, how the program is another
    failed: dict[tuple[tuple[str, str], ...], str] = {}  # the attributes that differ -> why there is no capture
    found: list[tuple[int, str]] = []
    told: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}  # what is said of the first member with these differences
    for i, hollow in enumerate(hollows):
        differ = differences(own, attributes_of(hollow.module)) if i else ()
        if not differ:
            continue
        key = tuple((d.path, d.other) for d in differ)
        how = next((how for read, there, how in known if read.texts(hollow.module) == there), failed.get(key))
        if how is None:
            try:
                captured, read = again(i)
            except CaptureError as e:
                how = failed[key] = f"it cannot be captured: {e}"
            else:
                how = difference(first[0], captured)
                known.append((read, read.texts(hollow.module), how))
        if how:
            found.append((i, told.setdefault((how, key), f"{how}; its modules differ in {in_words(differ, 'member 0', f'member {i}', len(differ))}")))
    if found:
        raise MemberMismatch(_numbered(f"in {mode} mode members are other programs than member 0", _of_members(found)) + f". {WAY_OUT}")


def refuse_gradients(module: nn.Module, trained: Collection[str]) -> None:
    """Refuse to take gradients of what has none that a fused module could give. trained: names of parameters. Raises: UsageError."""
    for name, part in module.named_modules():
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or f"{name}.weight".lstrip(".") not in trained:
            continue
        said = f"{name or 'the module'} ({type(part).__name__})"
        if part.max_norm is not None:
            raise UsageError(
                f"{said} has max_norm={part.max_norm}: torch writes the bounded rows into its weight at every call, beside the optimizer; a fused module bounds them in eval mode "
                "without gradients alone. To train it, take max_norm out and bound the rows after each step (torch.renorm)"
            )
        if part.sparse:
            raise UsageError(
                f"{said} has sparse gradients, of one member's rows; the weight of a fused module has the gradient of all members, which is dense. Set sparse=False"
            )

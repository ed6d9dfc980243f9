"""Binds the arguments of a call to the tensors of an entry's programs.

The checks are, in this order: names, kinds of values, then those of `call_check.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.entry import Entry
from widepack_artifacts.tree import Tree, leaves

from ..errors import InputError, UsageError
from ..ir.tensor_type import parse_slot
from ..ir.torch_internals import has_tangent, in_forward_mode, is_transformed
from ..spec.dtypes import dtype_of
from .call_check import CallCheck, LeafSpec, refuse_nested
from .input_names import CALL, InputNames
from .input_values import Each, describe, different_shapes, is_array, tensor_of, way_to_tensor

_DERIVATIVES = "ens[i](x) has gradients for one member, and widepack.fuse for all live modules"


@dataclass(slots=True)
class _BoundCall:
    """The tensors of a call, which are bound one after the other.

    values: For each leaf its tensor. per_member: For each leaf whether it has one value for each member.
    form: Of the call, for messages.
    """

    values: list[Any]
    per_member: list[bool]
    form: str


class Binder:
    """Binds and checks calls of one entry.

    Args:
        entry: The entry.
        members: N of the loaded model.
        device: Where inputs must be.
        stacked: Whether a state has one value for each member, `[N, ...]`. False: it is that of a single
            member.
        known: The names of all entries' states, which a call may pass too.
        model: What messages call the model.

    Attributes:
        states: The input, the output and the name of each state.
        carried: The numbers of the inputs that are states.
        leaves: What each tensor of a call must be.
        check: Checks a call's tensors, as `CallCheck.check` does.
    """

    def __init__(
        self,
        entry: Entry,
        members: int,
        device: torch.device,
        *,
        stacked: bool = True,
        known: Collection[str] = (),
        model: str = "ens",
    ) -> None:
        self.members = members
        self.device = device
        self.stacked = stacked
        self.states = [(s.input, s.output, entry.inputs[s.input].name) for s in entry.state]
        self.carried = {i for i, _, _ in self.states}
        self.known = {*known, *(name for _, _, name in self.states)}
        self.leaves = [
            LeafSpec(
                i.name,
                f"{'state' if k in self.carried else 'input'} {i.name}",
                dtype_of(parse_slot(i.type).dtype),
                parse_slot(i.type).dims,
                i.type,
            )
            for k, i in enumerate(entry.inputs)
        ]
        self._parameters = [p for p in entry.signature if not self.carried & set(leaves(p.tree))]
        self._names = InputNames(self._parameters, [name for _, _, name in self.states], model)
        self._positions = [p.name for p in self._parameters if p.kind == "positional"]
        self._required = ", ".join(p.name for p in self._parameters if not p.default)
        self._check = CallCheck(entry, self.leaves, members, device)
        self.check = self._check.check
        self.none = (False,) * len(self.leaves)
        self.all = (True,) * len(self.leaves)
        self._plain = self._count_plain()

    def _count_plain(self) -> int:
        """Returns how many tensors in a row are a whole call, leaf by leaf; -1 if a call needs more."""
        leading = [p for p in self._parameters if p.kind == "positional" and "leaf" in p.tree]
        in_order = [p.tree["leaf"] for p in leading] == list(range(len(self.leaves)))
        in_order = in_order and self._parameters[: len(leading)] == leading
        optional = all(p.default for p in self._parameters[len(leading) :])
        return len(leading) if in_order and optional and not self.states else -1

    def plain(self, args: Sequence[Any]) -> bool:
        """Returns whether the arguments are the call's tensors without change, so `bind` is not needed."""
        if len(args) != self._plain:
            return False
        for value in args:  # noqa: SIM110  a generator costs as much as the rest of the call
            if type(value) is not torch.Tensor:
                return False
        return True

    @property
    def description(self) -> str:
        """The inputs and states with their types: `inputs x=float32[B,8]; state h=float32[B,16]`."""
        groups = (
            ("inputs", [i for i in range(len(self.leaves)) if i not in self.carried]),
            ("state", sorted(self.carried)),
        )
        return "; ".join(
            f"{what} {', '.join(f'{self.leaves[i].name}={self.leaves[i].text}' for i in group)}"
            for what, group in groups
            if group
        )

    @property
    def state_dims(self) -> set[str]:
        """The dims of the states."""
        return {d.letter for i in self.carried for d in self.leaves[i].dims if not isinstance(d, int)}

    # ---------------------------------------------------------------- inputs

    def only(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the inputs of a dict that the entry uses. Raises: InputError."""
        return self._names.only(inputs)

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], form: str = CALL
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Returns the call's tensors, and for each whether it has one value for each member.

        form: of the call, for messages. Raises: InputError.
        """
        if len(args) > len(self._positions):
            raise InputError(
                f"the model takes {len(self._positions)} inputs by position ({', '.join(self._positions)}), "
                f"the call gives {len(args)}"
            )
        arguments = dict(zip(self._positions, args))
        for name, value in kwargs.items():
            if name in arguments:
                raise InputError(f"input {name} is given twice, by position and by name")
            arguments[name] = value
        self._names.check(arguments, form)
        call = _BoundCall([None] * len(self.leaves), [False] * len(self.leaves), form)
        for name, _, tree, default in self._parameters:
            if name in arguments:
                value = arguments[name]
                stacked = isinstance(value, Each)
                value = value.value if stacked else value
                self._bind_tree(tree, value, name, stacked, call)
            elif not default:
                built = ""
                if "const" in tree:
                    built = f"; it was built with {tree['const']!r}, which is not forward's default"
                raise InputError(f"input {name} is missing; the model takes {self._required}{built}")
        return call.values, call.per_member

    def _bind_tree(self, tree: Tree, value: Any, name: str, stacked: bool, call: _BoundCall) -> None:
        """Puts one argument into a call. stacked: with one value for each member."""
        ((form, inner),) = tree.items()
        if form == "leaf":
            self._bind_leaf(inner, value, name, stacked, call)
        elif form == "const":
            self._check_constant(inner, value, name)
        elif form in ("tuple", "list"):
            if not isinstance(value, (list, tuple)) or len(value) != len(inner):
                raise InputError(f"input {name} needs a {form} of {len(inner)}; got {describe(value)}")
            for i, (t, v) in enumerate(zip(inner, value)):
                self._bind_tree(t, v, f"{name}.{i}", stacked, call)
        elif form == "output":
            self._bind_fields(inner[0], inner[1], value, name, stacked, call)
        else:
            keys = [k for k, _ in inner]
            if not isinstance(value, Mapping) or set(value) != set(keys):
                way = self._names.way_of_part(value, keys, name) if isinstance(value, Mapping) else ""
                raise InputError(
                    f"input {name} needs a dict with the keys {', '.join(map(str, keys))}; "
                    f"got {describe(value)}{way}"
                )
            for k, t in inner:
                self._bind_tree(t, value[k], f"{name}.{k}", stacked, call)

    def _bind_fields(
        self, kind: str, rows: Sequence[Any], value: Any, name: str, stacked: bool, call: _BoundCall
    ) -> None:
        """Puts an argument with named fields into a call: a dict, a tuple, or an object with them."""
        trees = {str(k): tree for k, tree in rows}
        own = getattr(value, "_fields", None)
        if isinstance(value, Mapping):
            given = dict(value)
        elif isinstance(value, (list, tuple)) and own is None:
            given = dict(zip(trees, value)) if len(value) <= len(trees) else {}
        else:
            found = own if own is not None else [k for k in trees if hasattr(value, k)]
            given = {k: getattr(value, k) for k in found}
        # a literal of the program may be absent
        if not set(given) <= set(trees) or any(k not in given and "const" not in t for k, t in trees.items()):
            raise InputError(
                f"input {name} needs the fields {', '.join(trees)}, as a {kind} has them: a named tuple or "
                f"another object with these attributes, a tuple of {len(trees)}, or a dict; "
                f"got {describe(value)}" + (f" with the fields {', '.join(map(str, own))}" if own else "")
            )
        for k, part in given.items():
            self._bind_tree(trees[k], part, f"{name}.{k}", stacked, call)

    def _bind_leaf(self, leaf: int, value: Any, name: str, stacked: bool, call: _BoundCall) -> None:
        """Puts one tensor, or a list of N tensors, into a call."""
        if isinstance(value, Each):
            value, stacked = value.value, True
        spec = self.leaves[leaf]
        if stacked and isinstance(value, (list, tuple)):
            value = [self._tensor(v, f"input {name}", spec) for v in value]
            if len(value) != self.members or not all(
                isinstance(v, torch.Tensor) and v.shape == value[0].shape for v in value
            ):
                raise InputError(
                    f"input {name}: one value for each member needs {self.members} tensors of one shape, "
                    f"or one tensor [{self.members}, ...]; got {describe(value)}{different_shapes(value)}"
                )
            value = torch.stack(list(value))
        value = self._tensor(value, f"input {name}", spec)
        if not isinstance(value, torch.Tensor):
            if isinstance(value, Mapping):
                way = self._names.way_of_dict(value, call.form)
            else:
                way = way_to_tensor(value, name, spec.dtype)
            raise InputError(f"input {name} is {describe(value)}; the model takes a tensor {spec.text}{way}")
        call.values[leaf], call.per_member[leaf] = value, stacked

    def _tensor(self, value: Any, title: str, leaf: LeafSpec) -> Any:
        """Returns a NumPy array as a tensor, a conjugated view in memory, and any other value as it is.

        Raises: InputError, also for a nested tensor.
        """
        if isinstance(value, torch.Tensor):
            refuse_nested(value, title)
            return value.resolve_conj() if value.is_complex() else value
        return tensor_of(value, title, leaf.dtype, self.device) if is_array(value) else value

    @staticmethod
    def _check_constant(constant: Any, value: Any, name: str) -> None:
        """Checks an argument that is not a tensor: it is part of the program."""
        if is_array(value) and not value.shape and hasattr(value, "item"):
            value = value.item()
        literal = value is None or isinstance(value, (bool, int, float, str))
        if literal and value == constant:
            return
        raise InputError(
            f"input {name} is {repr(value) if literal else describe(value)}; "
            f"the model was built with {constant!r} there, which is part of its program. "
            "Build another artifact for other values"
        )

    def refuse_derivatives(self, values: Sequence[torch.Tensor]) -> bool:
        """Refuses tensors of which the caller wants derivatives: the programs of an artifact give none.

        Returns: whether a tensor requires grad (while gradients are off). Raises: InputError.
        """
        for leaf, value in zip(self.leaves, values):
            if is_transformed(value):
                raise InputError(
                    f"{leaf.title} is inside a transform of torch.func, which a loaded artifact does "
                    f"not support; {_DERIVATIVES}"
                )
            if in_forward_mode() and has_tangent(value):
                raise InputError(
                    f"{leaf.title} has a tangent of torch.autograd.forward_ad, and a loaded artifact gives "
                    f"no derivatives; {_DERIVATIVES}"
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise InputError(
                    f"{leaf.title} requires grad, and a loaded artifact gives no gradients: call it under "
                    f"torch.no_grad(), or with .detach(); {_DERIVATIVES}"
                )
        return any(value.requires_grad for value in values)

    # ---------------------------------------------------------------- states

    def carry(self, values: list[Any], per_member: list[bool], state: Any) -> None:
        """Puts the states into a call's tensors.

        state: {name: tensor}, from `state()` or from the last call. Raises: InputError.
        """
        names = ", ".join(name for _, _, name in self.states)
        if not isinstance(state, Mapping):
            model = "ens" if self.stacked else "member"
            sizes = self._sizes_of_states(values, per_member)
            raise InputError(
                f"{'state is missing' if state is None else f'state is {describe(state)}'}; this "
                f"model carries {names} from call to call: start with state = {model}.state({sizes}), "
                f"and continue with y, state = {model}(x, state=state)"
            )
        if unknown := [str(k) for k in state if k not in self.known]:
            raise InputError(
                f"state has {', '.join(unknown)}, which the model does not carry; "
                f"it carries {', '.join(sorted(self.known))}"
            )
        for i, _, name in self.states:
            if name not in state:
                raise InputError(
                    f"state lacks {name}; the model carries {names}: state() gives them as they begin"
                )
            value = self._tensor(state[name], f"state {name}", self.leaves[i])
            if not isinstance(value, torch.Tensor):
                each = ", one value for each member" if self.stacked else ""
                raise InputError(
                    f"state {name} is {describe(state[name])}; "
                    f"the model carries a tensor {self.leaves[i].text}{each}"
                )
            values[i], per_member[i] = value, self.stacked

    def _sizes_of_states(self, values: Sequence[Any], per_member: Sequence[bool]) -> str:
        """Returns the arguments of `state` for the inputs of a call, for messages: `B=8`."""
        needed = self.state_dims
        sizes: dict[str, int] = {}
        for leaf, value, stacked in zip(self.leaves, values, per_member):
            shape = value.shape[stacked:] if isinstance(value, torch.Tensor) else ()
            for size, dim in zip(shape, leaf.dims):
                if not isinstance(dim, int) and dim.letter in needed:
                    sizes.setdefault(dim.letter, size // dim.factor)
        return ", ".join(f"{letter}={sizes.get(letter, 1)}" for letter in sorted(needed))

    def fresh(self, initial: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Returns the states as they begin: a buffer's value, or zeros for an input.

        initial: the buffers by name. Raises: UsageError if the size of a dim is missing.
        """
        found = {}
        for i, _, name in self.states:
            leaf = self.leaves[i]
            if name in initial:
                found[name] = initial[name].clone(memory_format=torch.contiguous_format)
                continue
            missing = [d.letter for d in leaf.dims if not isinstance(d, int) and d.letter not in sizes]
            if missing:
                dims = self._check.dims
                example = ", ".join(f"{d}={dims[d][0] + 1}" for d in dict.fromkeys(missing))
                raise UsageError(
                    f"state {name} is {leaf.text}, and its size depends on {', '.join(missing)}: "
                    f"give it, for example state({example})"
                )
            shape = [d if isinstance(d, int) else d.factor * sizes[d.letter] for d in leaf.dims]
            found[name] = torch.zeros(
                [self.members, *shape] if self.stacked else shape, dtype=leaf.dtype, device=self.device
            )
        return found


class NamedInputs:
    """Selects the inputs of a call by name."""

    _binder: Binder

    def only(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of a dict's inputs that the model uses.

        A call refuses an input that it does not use, since a name may be misspelled. A tokenizer's dict often
        has such inputs (`token_type_ids`, `offset_mapping`). `only` drops them where the caller says so. It
        is a method, not an option of a call: an option could have the name of an input, and a method serves
        all forms of call alike. Values are neither copied nor checked.

        An input is dropped if the model has none of this name, or if the artifact was built without it and
        its value is a tensor: the default, for example `token_type_ids=None`, is part of the program then, so
        the answer is the member's own without that input. In an input that is a dict, unused keys are dropped
        too.

        Args:
            inputs: The inputs by name: a dict, or another mapping, for example a `BatchEncoding` of
                transformers. Values are as a call takes them.

        Returns:
            A new dict, in the order of `inputs`.

        Raises:
            InputError: `inputs` is not a mapping.

        Example:
            >>> batch = tokenizer(texts, return_tensors="pt", padding=True)
            >>> y = ens(**ens.only(batch))
            >>> y = ens.route(**ens.only(batch), member=ids)
        """
        return self._binder.only(inputs)

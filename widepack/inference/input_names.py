"""Compares the names of a call's inputs with those of an entry, and drops the ones that it does not use.

| an input of the call | what a call does | what `only` does |
|---|---|---|
| a tensor of the entry | takes it | keeps it |
| a number, string or None that is part of the program | takes this value only | keeps it |
| a tensor for a parameter that the artifact was built without | refuses it | drops it |
| a name that the entry does not have | refuses it | drops it |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from widepack_artifacts.entry import Parameter
from widepack_artifacts.tree import Tree

from ..errors import InputError
from .input_values import Each, describe, holds_tensor, is_array

CALL = "{model}({inputs})"
EACH = "{model}.each({inputs})"
ROUTE = "{model}.route({inputs}, member=...)"
REDUCE = "{model}.reduce({figures}, {inputs})"


class InputNames:
    """The names of the inputs of an entry.

    Args:
        parameters: The parameters of the method that are not states.
        states: The names of the states.
        model: What messages call the model: `ens`.
    """

    def __init__(self, parameters: Sequence[Parameter], states: Collection[str], model: str) -> None:
        self._trees = {p.name: p.tree for p in parameters}
        self._states = frozenset(states)
        self._model = model
        # parameters that the artifact was built without: their defaults are part of the program
        self._absent = {p.name: p.tree["const"] for p in parameters if p.default and "const" in p.tree}
        self._used = [p.name for p in parameters if p.name not in self._absent]
        self._always = frozenset(self._used)
        self._plain = frozenset(p.name for p in parameters if "leaf" in p.tree)

    # ---------------------------------------------------------------- selection

    def only(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the inputs that the entry uses. Raises: InputError if they are not given by name."""
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"only takes a dict of inputs by name, for example a tokenizer's; got {describe(inputs)}"
            )
        return {
            name: value if name in self._plain else _of_tree(self._trees[name], value)
            for name, value in inputs.items()
            if name in self._plain or (name in self._trees and not self._is_unread(name, value))
        }

    def _is_unread(self, name: str, value: Any) -> bool:
        """Returns whether a value is a tensor for a parameter that the artifact was built without."""
        return name in self._absent and _is_tensor(value)

    # ---------------------------------------------------------------- refusals

    def check(self, arguments: Mapping[str, Any], form: str) -> None:
        """Checks the names of a call's arguments. form: of the call, for messages. Raises: InputError."""
        if self._always.issuperset(arguments):
            return
        unknown = [n for n in arguments if n not in self._trees]
        unread = [n for n, value in arguments.items() if self._is_unread(n, value)]
        if unknown or unread:
            raise InputError(self._refusal(unknown, unread, form))

    def _refusal(self, unknown: Sequence[str], unread: Sequence[str], form: str) -> str:
        """Returns the message about inputs that the entry does not use."""
        if states := [n for n in unknown if n in self._states]:
            values = ", ".join(f"{n!r}: ..." for n in states)
            return f"{', '.join(states)} is a state, not an input; give it as state={{{values}}}"
        reasons = []
        if unknown:
            reasons.append(f"the model has no input {', '.join(map(repr, unknown))}")
        if unread:
            defaults = ", ".join(dict.fromkeys(repr(self._absent[n]) for n in unread))
            it = "its default" if len(unread) == 1 else "their defaults"
            reasons.append(
                f"the model was built without {', '.join(map(repr, unread))}: {it} ({defaults}) "
                f"{'is' if len(unread) == 1 else 'are'} part of its program"
            )
        them = "it" if len(unknown) + len(unread) == 1 else "them"
        said = f"{', and '.join(reasons)}; its inputs are {', '.join(self._used)}. "
        if not unread:
            return (
                f"{said}Leave {them} out of the call, or drop {them} with only: {self._call(form, True)}. "
                f"To use {them}, build an artifact with a sample that has {them}"
            )
        every = " and ".join([", ".join([*self._used, *unread][:-1]), unread[-1]])
        drop = f"To drop {them}, which may change the answers, call {self._call(form, True)}"
        again = "fuse the modules" if self._model.startswith("fused") else "build it"
        return f"{said}To use {'it' if len(unread) == 1 else 'them'}, {again} again with {every}. {drop}"

    def way_of_dict(self, value: Mapping[Any, Any], form: str) -> str:
        """Returns the call to make with a dict that was given as a tensor, as the end of a message."""
        if not any(k in self._used for k in value):
            return f"; the inputs of the model are {', '.join(self._used)}"
        others = any(k not in self._trees or self._is_unread(k, v) for k, v in value.items())
        return f"; give the values of a dict by name: {self._call(form, others)}"

    def way_of_part(self, value: Mapping[Any, Any], keys: Collection[Any], name: str) -> str:
        """Returns how to drop keys of a dict input that the entry does not use, as the end of a message."""
        if not set(keys) < set(value):
            return ""
        others = ", ".join(repr(k) for k in value if k not in keys)
        outer = name.partition(".")[0]
        return f"; leave {others} out, or drop them with {self._model}.only({{{outer!r}: {outer}}})"

    def _call(self, form: str, drops: bool) -> str:
        """Returns the text of a call with inputs from a dict. drops: those that the entry does not use."""
        inputs = f"**{self._model}.only(inputs)" if drops else "**inputs"
        return form.replace("{model}", self._model).replace("{inputs}", inputs)


def _is_tensor(value: Any) -> bool:
    """Returns whether a value has tensors. An array without dims may be a number of the program."""
    value = value.value if isinstance(value, Each) else value
    return holds_tensor(value) and not (is_array(value) and not value.shape)


def _of_tree(tree: Tree, value: Any) -> Any:
    """Returns a value without the keys of dicts that the entry does not use."""
    rows = tree["dict"] if "dict" in tree else tree["output"][1] if "output" in tree else None
    if rows is None or not isinstance(value, Mapping):
        return value
    parts = dict(rows)
    return {k: _of_tree(parts[k], v) for k, v in value.items() if k in parts}

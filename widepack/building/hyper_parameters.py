"""Compares the hyperparameters in Lightning's checkpoints with the arguments of the factory.

A checkpoint may say `heads=4` where the factory makes a model with `heads=2`. Both may have the same weights,
and answer differently. So a member whose checkpoint says something else is captured with that too. A value
that gives the same program (a learning rate), or that does not fit the weights, is not mentioned.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoints.alignment import Alignment
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.factory import Factory
from ..errors import MemberMismatch, WidepackError
from ..verification.same_program import difference
from .captures import Captures

_MOST = 4
"""Captures with other arguments of one entry."""
_PLAIN = (bool, int, float, str, list, tuple, type(None))


def advice(factory: Factory, opened: Sequence[Checkpoint]) -> str:
    """Returns the hyperparameters of checkpoints that the factory takes and was not given; "" if none."""
    first = opened[0].settings if opened else {}
    usable = {k: v for k, v in first.items() if k in factory.defaults and v != factory.defaults[k]}
    equal = {k: v for k, v in usable.items() if all(c.settings.get(k) == v for c in opened)}
    if equal:
        return f" The checkpoints' hyper_parameters have arguments of the factory: give {_options(equal)}"
    for name in usable:
        other = next(c for c in opened if c.settings.get(name) != usable[name])
        return (
            f" The checkpoints' hyper_parameters differ in {name}: {usable[name]!r} in {opened[0].path},"
            f" {other.settings.get(name)!r} in {other.path}; a factory with a parameter state_dict= can read"
            " sizes from each member's weights"
        )
    return ""


def contradicted(factory: Factory, aligned: Alignment, captures: Captures) -> dict[str, dict[str, Any]]:
    """Returns the arguments that the user gave against the checkpoints, and that change the program.

    Returns:
        For each argument its value (`given`) and that of the checkpoints (`stored`).

    Raises:
        MemberMismatch: A default of the factory contradicts a checkpoint, or the members' checkpoints
            contradict one another, and the program changes.
    """
    found: dict[str, dict[str, Any]] = {}
    if type(factory) is not Factory or not captures.repeatable:
        return found
    rows: dict[str, tuple[int, dict[str, Any]]] = {}
    for i, checkpoint in enumerate(aligned.checkpoints):
        if row := _other_values(factory, checkpoint.settings):
            rows.setdefault(f"{captures.signatures[i]} {row!r}", (i, row))
    for i, row in list(rows.values())[:_MOST]:
        if not (words := _changes(factory, captures, i, row)):
            continue
        alone = {k: v for k, v in row.items() if len(row) == 1 or _changes(factory, captures, i, {k: v})}
        for name, stored in (alone or row).items():
            others = [c for c in aligned.checkpoints if _plain(c.settings.get(name)) != _plain(stored)]
            if name not in factory.args or others:
                raise _error(factory, aligned.checkpoints[i], others, name, stored, words)
            found[name] = {"given": factory.args[name], "stored": stored}
    return found


def _error(
    factory: Factory, one: Checkpoint, others: Sequence[Checkpoint], name: str, stored: object, words: str
) -> MemberMismatch:
    value = {**factory.defaults, **factory.args}[name]
    way_out = f"give {_options({name: stored})}, or {_options({name: value})} if the checkpoints are wrong"
    if others:
        way_out = (
            f"{others[0].label} has {others[0].settings.get(name)!r}, and members differ in weights only:"
            " build these apart"
        )
    return MemberMismatch(
        f"checkpoint {one.label}: its hyper_parameters have {name}={stored!r}, and the model is made with"
        f" {name}={value!r}. With {stored!r} it is another program: {words}; {way_out}"
    )


def _other_values(factory: Factory, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are arguments of the factory and have another value there."""
    values = {**factory.defaults, **factory.args}
    return {
        name: stored
        for name, stored in settings.items()
        if name in values and isinstance(values[name], _PLAIN) and _plain(values[name]) != _plain(stored)
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _changes(factory: Factory, captures: Captures, i: int, row: Mapping[str, Any]) -> str:
    """Returns how member i's program changes with other arguments; "" if it does not, or cannot be made."""
    signature = captures.signatures[i]
    one = captures.repeatable[signature]
    members = replace(one.members, factory=factory.with_args(row))
    try:
        other = replace(one, members=members).repeat(i, None)
    except WidepackError:
        return ""  # these values do not fit the weights
    return difference(captures.captured[signature], other)


def _options(values: Mapping[str, Any]) -> str:
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    return " ".join(f"--model-arg {shlex.quote(f'{k}={text}')}" for k, text in texts.items())

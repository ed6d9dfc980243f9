"""Puts loaded members in eval mode, and finds what their own `train()` or `eval()` changes.

`nn.Module.eval` sets `training` of each part, and nothing else. A module's own may do more: it merges a
low-rank update into a weight, rounds the weights, or swaps them with an average. An artifact stores the
weights of a checkpoint, and gives them back as they were, so such a member is refused. What `eval()` computes
outside of the weights (a cached tensor, a number) is captured with the member. A state dict alone does not
give it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from widepack_artifacts.errors import some

from ..errors import UsageError
from .differences import bit_equal

_MODES = ("train", "eval")
_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes)
_DEPTH = 4  # levels of lists and dicts under an attribute


def has_own_mode(module: nn.Module, parts: bool = True) -> bool:
    """Returns whether a module has a `train()` or `eval()` of its own, which may do more than set a mode.

    parts: whether the modules in it count too.
    """
    return any(
        getattr(type(part), name) is not getattr(nn.Module, name) or name in vars(part)
        for part in (module.modules() if parts else [module])
        for name in _MODES
    )


def in_eval_mode(module: nn.Module) -> nn.Module:
    """Puts a member with its weights in eval mode, and returns it.

    Raises: UsageError for an error of the module's own code.
    """
    _in_mode(module, False)
    return module


def _in_mode(module: nn.Module, mode: bool) -> None:
    method = "train" if mode else "eval"
    try:
        getattr(module, method)()
    except Exception as e:
        words = " ".join(str(e).split())[:300]
        raise UsageError(f"{method}() of {type(module).__name__} raised {type(e).__name__}: {words}") from e


def eval_results(module: nn.Module, label: str) -> list[str]:
    """Puts a member with its weights in eval mode, and returns what that sets beside the weights, by name.

    label: the checkpoint, for messages. Raises: UsageError if `eval()` changes weights, with their names.
    """
    changed, beside = _changes(module, False)
    if changed:
        name = type(module).__name__
        raise UsageError(
            f"{label}: eval() of {name} changes the weights {some(changed)}, so its answers"
            " are not those of the weights in the checkpoint, which an artifact stores. Load each checkpoint"
            f" into a {name}, call m.eval(), and save it: either torch.save(m.state_dict()), for a build with"
            " a model whose eval() changes no weight, or the whole module with torch.save(m), for a build"
            " without a model and with trust_pickle (--trust-pickle)"
        )
    return beside


def changed_by_mode(module: nn.Module, mode: bool) -> list[str]:
    """Calls `train()` or `eval()` of a module, and returns the names of all that it changes beside the modes.

    mode: whether `train()` is called. Raises: UsageError for an error of the module's own code.
    """
    weights, beside = _changes(module, mode)
    return [*weights, *beside]


def _changes(module: nn.Module, mode: bool) -> tuple[list[str], list[str]]:
    """Returns the weights that `train()` or `eval()` changes, and what it sets beside them."""
    before, beside = _copies(_saved(module)), _copies(_beside(module))
    _in_mode(module, mode)
    after, now = dict(_saved(module)), dict(_beside(module))
    changed = [n for n in {**before, **after} if not _same_bits(before.get(n), after.get(n))]
    parts = set(map(id, module.modules()))
    return changed, [n for n in {**beside, **now} if not _kept(beside.get(n), now.get(n), parts)]


def _saved(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the parameters and the saved buffers with their names."""
    for path, part in module.named_modules():
        own = vars(part)
        for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
            if tensor is not None and name not in own["_non_persistent_buffers_set"]:
                yield f"{path}.{name}".lstrip("."), tensor


def _beside(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the unsaved buffers and the plain attributes of all parts."""
    for path, part in module.named_modules():
        own = vars(part)
        unsaved = {n: own["_buffers"].get(n) for n in own["_non_persistent_buffers_set"]}
        plain = {n: v for n, v in own.items() if n != "training" and n not in _TORCH}
        for name, value in {**plain, **unsaved}.items():
            yield f"{path}.{name}".lstrip("."), value


def _copies(values: Iterable[tuple[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Returns each value with a copy of it, if it is a tensor, a list, a dict or a set."""
    return {name: (value, _copied(value)) for name, value in values}


def _copied(value: Any, depth: int = _DEPTH) -> Any:
    if isinstance(value, Tensor):
        return value if is_lazy(value) else value.detach().clone()
    if isinstance(value, (list, tuple)) and depth:
        return [_copied(v, depth - 1) for v in value]
    if isinstance(value, dict) and depth:
        return {key: _copied(v, depth - 1) for key, v in value.items()}
    return set(value) if isinstance(value, set) else value


def _as_copied(copy: Any, now: Any, depth: int = _DEPTH) -> bool:
    """Returns whether a value is as it was when it was copied."""
    if isinstance(now, Tensor):
        return isinstance(copy, Tensor) and (copy is now if is_lazy(now) else bit_equal(copy, now))
    if isinstance(now, (list, tuple)) and depth:
        return type(copy) is list and len(copy) == len(now) and all(
            _as_copied(a, b, depth - 1) for a, b in zip(copy, now)
        )  # fmt: skip
    if isinstance(now, dict) and depth:
        return type(copy) is dict and copy.keys() == now.keys() and all(
            _as_copied(copy[key], v, depth - 1) for key, v in now.items()
        )  # fmt: skip
    return copy is now or (isinstance(now, (set, *_PLAIN)) and type(copy) is type(now) and copy == now)


def _same_bits(before: tuple[Any, Any] | None, now: Any) -> bool:
    if before is None or now is None:
        return False
    value, copy = before
    return value is now if is_lazy(value) or is_lazy(now) else bit_equal(copy, now)


def _kept(before: tuple[Any, Any] | None, now: Any, parts: set[int]) -> bool:
    """Returns whether an attribute is as before: its object and content; or is a method of a part."""
    if isinstance(now, types.MethodType) and id(now.__self__) in parts:
        return True
    return before is not None and before[0] is now and _as_copied(before[1], now)

"""Members: the factory that makes a fresh module, and the alignment of N checkpoints into one table of weights.

The kind of a weight is found here once, from the bits:

| kind | when |
|---|---|
| shared | N > 1, `share="auto"`, and all members hold the same bits (so NaN equals itself, and 0.0 is not -0.0) |
| stacked | all members have one shape |
| ragged | the shapes differ, and the factory takes `state_dict=`, so that it can build a member of each size |

All other differences between the checkpoints, or between them and the model, are one `MemberMismatch` that lists them all.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor, nn

from .discovery import Checkpoint, TensorInfo, an, info_of, is_floating
from ..errors import MemberMismatch, UsageError

Kind = Literal["shared", "stacked", "ragged"]
Shapes = tuple[int, ...] | tuple[tuple[int, ...], ...]
_PIECE_BYTES = 16 << 20


class Factory:
    """What `--model` names: called, it makes one fresh member in eval mode, with the weights that its constructor draws.

    name: as the user wrote it. args: the keyword arguments of every call. takes_state_dict: whether it sizes itself by `state_dict=`. dtype: what the floating
    weights of every member are converted to, or None: as they are made.
    """

    def __init__(self, name: str, make: Callable[..., object], args: Mapping[str, object], folder: str = "") -> None:
        self.name = name
        self.args = dict(args)
        self.takes_state_dict = _takes_state_dict(make)
        self._make = make
        self._folder = folder
        self._last: weakref.ref[nn.Module] | None = None
        self.dtype: torch.dtype | None = None
        if "state_dict" in self.args:
            raise UsageError(f"model {name}: the argument state_dict is widepack's own; it passes each member's weights")

    def __repr__(self) -> str:
        return f"Factory({self.call})"

    @property
    def call(self) -> str:
        """The call as a person writes it: `cases.mlp:model(width=64)`."""
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.args.items())})"

    def __call__(self, state_dict: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Make a fresh member. state_dict: passed on only to a factory with a parameter of that name. Raises: UsageError."""
        extra = {"state_dict": state_dict} if self.takes_state_dict else {}
        try:
            with _importable(self._folder):
                module = self._make(**self.args, **extra)
        except (Exception, SystemExit) as error:
            raise UsageError(f"model {self.call} raised {_raised(error)}{self._signature(error)}") from error
        if not isinstance(module, nn.Module):
            raise UsageError(f"model {self.call} returned {an(module)}; a factory returns a torch.nn.Module")
        if self._last is not None and self._last() is module:
            raise UsageError(f"model {self.call} returned the same module twice; one that ran may hold data, so a factory makes a fresh one")
        self._last = weakref.ref(module)
        return module.eval() if self.dtype is None else module.eval().to(self.dtype)

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """The fresh member that a checkpoint's weights go into. A factory of the user's goes by the weights alone; others look into the file. Raises: UsageError."""
        return self(state_dict=state_dict)

    def _signature(self, error: BaseException) -> str:
        if not isinstance(error, TypeError):
            return ""
        try:
            return f"; it takes {inspect.signature(self._make)}"
        except (TypeError, ValueError):
            return ""


def load_factory(model: str | Callable[..., object], args: Mapping[str, object] | None = None) -> Factory:
    """Find the factory that `model` names.

    model: a callable, `"pkg.mod:factory"` (the working folder is searched too) or `"path/file.py:factory"`; the attribute may be dotted. args: its keyword
    arguments. Raises: UsageError that says what cannot be imported or found, and where the user's own code failed.
    """
    if not isinstance(model, str):
        name = getattr(model, "__qualname__", None) or type(model).__name__
        return Factory(name, _checked(model, name), args or {})
    where, colon, attribute = model.rpartition(":")
    if not colon or not where or not attribute:
        raise UsageError(f"model {model!r} names no factory: write pkg.mod:factory or path/file.py:factory")
    if where.endswith(".py") or os.sep in where or "/" in where:
        module, folder = _from_file(where, model)
    else:
        module, folder = _from_name(where, model), os.getcwd()
    found: object = module
    for i, part in enumerate(attribute.split(".")):
        if not hasattr(found, part):
            raise UsageError(f"model {model!r}: {':'.join([where, *attribute.split('.')[:i]])} has no {part!r}{_offered(found, part)}")
        found = getattr(found, part)
    return Factory(model, _checked(found, model), args or {}, folder)


def _checked(found: object, name: str) -> Callable[..., object]:
    if isinstance(found, nn.Module):
        raise UsageError(f"model {name!r} is a module, not a factory: give the class or a function that makes a fresh one on every call")
    if not callable(found):
        raise UsageError(f"model {name!r} is {an(found)}; a factory is a class or function that returns a torch.nn.Module")
    return found


def _takes_state_dict(make: Callable[..., object]) -> bool:
    try:
        parameter = inspect.signature(make).parameters.get("state_dict")
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _offered(found: object, part: str) -> str:
    """What could have been meant: classes of modules and functions that the module itself defines."""
    home = getattr(found, "__name__", "")
    made = {k: v for k, v in vars(found).items() if inspect.isclass(v) or inspect.isfunction(v)}
    names = [k for k, v in made.items() if not k.startswith("_") and v.__module__ == home]
    close = get_close_matches(part, names, n=1)
    return (f"; did you mean {close[0]}?" if close else "." if names else "") + (f" It defines {', '.join(sorted(names)[:12])}." if names else "")


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Put a folder in front of sys.path for a while, as `python file.py` does for good."""
    if not folder or folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _from_name(name: str, model: str) -> ModuleType:
    here = os.getcwd()
    try:
        with _importable(here):
            importlib.invalidate_caches()  # a file that was written a moment ago is found
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"model {model!r}: there is no module {error.name!r}, neither installed nor in {here}") from None
        raise UsageError(f"model {model!r}: importing {name} raised {_raised(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"model {model!r}: importing {name} raised {_raised(error)}") from error


def _from_file(where: str, model: str) -> tuple[ModuleType, str]:
    path = Path(where).resolve()
    if not path.is_file():
        raise UsageError(f"model {model!r}: there is no file {where}")
    if path.suffix != ".py":
        raise UsageError(f"model {model!r}: {where} is no Python file; write path/file.py:factory")
    # A file of a package is imported as a part of it, so that its relative imports hold.
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier() and folder.parent != folder:
        names.insert(0, folder.name)
        folder = folder.parent
    if path.stem == "__init__":
        names.pop()
    name = ".".join(names)
    try:
        with _importable(str(folder)):
            importlib.invalidate_caches()
            if len(names) > 1 and _is_file(module := importlib.import_module(name), path):
                return module, str(folder)
            return _exec_file(path), str(folder)
    except (Exception, SystemExit) as error:
        raise UsageError(f"model {model!r}: importing {where} raised {_raised(error)}") from error


def _is_file(module: ModuleType, path: Path) -> bool:
    found = getattr(module, "__file__", None)
    return found is not None and Path(found).resolve() == path


def _exec_file(path: Path) -> ModuleType:
    """Import a lone file under a name that no other module has; once, so that its classes stay the same."""
    name = f"_widepack_model_{abs(hash(str(path))):x}_{path.stem}"
    if (known := sys.modules.get(name)) is not None and getattr(known, "__widepack_mtime__", None) == path.stat().st_mtime_ns:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    module.__dict__["__widepack_mtime__"] = path.stat().st_mtime_ns
    return module


def _raised(error: BaseException) -> str:
    """`ValueError: width must be even (model.py:12)`, with the last line that is the user's own."""
    if isinstance(error, SystemExit):
        return "SystemExit: it ends the program; put what a script runs under `if __name__ == '__main__':`"
    words = " ".join(str(error).split())
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and not f.filename.startswith("<frozen")]
    if own and "importlib" not in own[-1].filename:
        frame = next((f for f in reversed(own) if "site-packages" not in f.filename), own[-1])
        text += f" ({frame.filename}:{frame.lineno})"
    return text


@dataclass(frozen=True, slots=True)
class AlignedWeight:
    """One weight of the member, over all members.

    shape: of one member; for a ragged weight N shapes. role: parameter, buffer or constant, filled in where it is known. aliases: other names of the same
    tensor in the model (tied weights).
    """

    name: str
    kind: Kind
    dtype: str
    shape: Shapes
    role: str = ""
    aliases: tuple[str, ...] = ()


def repeated(one: Alignment, names: Sequence[str]) -> Alignment:
    """One member N times: every weight is Shared. names: the N members'."""
    weights = tuple(replace(w, kind="shared") for w in one.weights)
    return Alignment(tuple(names), one.checkpoints * len(names), weights)


@dataclass(frozen=True)
class Alignment:
    """N checkpoints of one architecture: the weights' table, in the model's order, and where the bits are.

    names: the members'. checkpoints: those that were given, under the model's names.
    """

    names: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    weights: tuple[AlignedWeight, ...]

    def tensor(self, member: int, name: str) -> Tensor:
        """One member's weight, mapped where its file allows; an alias is found too. Raises: KeyError."""
        canonical = next((w.name for w in self.weights if name in w.aliases), name)
        return self.checkpoints[member].get(canonical)

    def state_dict(self, member: int) -> dict[str, Tensor]:
        """One member's weights under every name that the model has for them, ready for `load_state_dict`."""
        own = self.checkpoints[member]
        return own.versioned({name: tensor for w in self.weights for tensor in [own.get(w.name)] for name in (w.name, *w.aliases)})

    @property
    def signatures(self) -> tuple[int, ...]:
        """For each member the number of its shapes: members with equal shapes have equal numbers, counted from 0 in order."""
        ragged = [w.shape for w in self.weights if w.kind == "ragged"]
        rows = [tuple(shape[i] for shape in ragged) for i in range(len(self.names))]
        order = list(dict.fromkeys(rows))
        return tuple(order.index(row) for row in rows)


def read_names(names: str | Path | Sequence[str], count: int) -> list[str]:
    """The members' names, as a user gives them.

    names: a list, a text `A,B,...`, or the path of a file with one name a line. count: how many checkpoints there are.
    Raises: UsageError that says which name cannot be one, is there twice, or is one too few or too many.
    """
    names = str(names) if isinstance(names, Path) else names
    if isinstance(names, str) and "," not in names and os.path.isfile(names):
        try:
            found = [line.strip() for line in Path(names).read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"names: {names} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    else:
        found = [name.strip() for name in names.split(",")] if isinstance(names, str) else [str(name) for name in names]
    if len(found) != count:
        no_file = f", and there is no file {names}" if isinstance(names, str) and "," not in names and not os.path.isfile(names) else ""
        raise UsageError(f"{count} checkpoints and {len(found)} names; every member has one of each{no_file}")
    for name in found:
        if not name or len(name) > 1000 or not name.isprintable():
            raise UsageError(f"names: {name[:60]!r} is no name; a name is printable text of 1 to 1000 characters")
    _refuse_twice(found)
    return found


def _refuse_twice(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise UsageError(f"the members' names must differ: {', '.join(sorted(n for n, times in Counter(names).items() if times > 1))} is given twice")


def align(
    checkpoints: Sequence[Checkpoint],
    names: Sequence[str],
    share: str = "auto",
    model_state: Mapping[str, Tensor] | None = None,
    ragged: bool = False,
) -> Alignment:
    """Bring N checkpoints into one table of weights.

    names: the members', unique. share: `auto`, or `none`: no weight is Shared. model_state: the state dict of a fresh member, which says what must be there and
    which weights are tied. ragged: whether shapes may differ (the factory takes `state_dict=`).
    Raises: UsageError; MemberMismatch with all differences.
    """
    if share not in ("auto", "none"):
        raise UsageError(f"share={share!r} is unknown; known: auto, none")
    if not checkpoints or len(names) != len(checkpoints):
        raise UsageError(f"{len(checkpoints)} checkpoints and {len(names)} names; every member has one of each")
    _refuse_twice(names)
    if model_state is not None:
        checkpoints = [under_model_names(c, model_state) for c in checkpoints]
    model = None if model_state is None else {name: info_of(tensor) for name, tensor in model_state.items()}
    infos = [c.tensors() for c in checkpoints]
    canonical, aliases = _tied(model_state or {}, infos)
    _refuse_differences(checkpoints, infos, model, canonical, ragged)

    weights = []
    for name in model if model is not None else infos[0]:
        if canonical.get(name, name) == name:
            shapes = [info[name].shape for info in infos]
            kind, shape = _kind(checkpoints, name, shapes, share)
            weights.append(AlignedWeight(name, kind, infos[0][name].dtype, shape, aliases=aliases.get(name, ())))
    return Alignment(tuple(names), tuple(checkpoints), tuple(weights))


def _kind(checkpoints: Sequence[Checkpoint], name: str, shapes: list[tuple[int, ...]], share: str) -> tuple[Kind, Shapes]:
    if len(set(shapes)) > 1:
        return "ragged", tuple(shapes)
    if share == "none" or len(shapes) == 1:
        return "stacked", shapes[0]
    first = checkpoints[0].get(name)
    same = all(bit_equal(first, other.get(name)) for other in checkpoints[1:])  # the first that differs ends it
    return "shared" if same else "stacked", shapes[0]


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; reads them piece by piece and stops at the first difference."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    step = max(1, _PIECE_BYTES // a.element_size())
    starts = [0, *range(1024, a.numel(), step)]  # a small piece first: trained members differ in it, and no more is read from disk
    ends = [*starts[1:], a.numel()]
    return all(torch.equal(a[s:e].view(torch.uint8), b[s:e].view(torch.uint8)) for s, e in zip(starts, ends))


def mismatch(checkpoint: Checkpoint, model_state: Mapping[str, Tensor], ragged: bool, about: str = "") -> str:
    """Why a checkpoint is not of this model, in words without its name; empty when it is. about: of the ways out those alone that hold this text."""
    checkpoint = under_model_names(checkpoint, model_state)
    infos = [checkpoint.tensors()]
    found, hints = _differences([checkpoint], infos, {n: info_of(t) for n, t in model_state.items()}, _tied(model_state, infos)[0], ragged, [""])
    return " ".join([("; ".join(line.removeprefix(":").strip() for line in found) + "."), *(h for h in hints if about in h)]) if found else ""


def under_model_names(checkpoint: Checkpoint, model: Mapping[str, object]) -> Checkpoint:
    """A checkpoint under the names that the model has.

    What was taken off its names is given back where the model itself is wrapped and has it. Where none of the model's names is in the checkpoint, and all of
    them are under one prefix (`model.` in a checkpoint of Lightning), that part is taken; the rest belongs to what the model does not have.
    """
    if checkpoint.prefix and model and all(name.startswith(checkpoint.prefix) for name in model):
        return checkpoint.unstripped()
    whole = checkpoint.unstripped()
    if sum(name in model for name in whole.tensors()) > sum(name in model for name in checkpoint.tensors()):
        return whole
    inside = _prefixes(checkpoint, model)
    return checkpoint.under(inside[0]) if len(inside) == 1 else checkpoint


def _prefixes(checkpoint: Checkpoint, model: Mapping[str, object]) -> list[str]:
    """The prefixes under which all of the model's names are in a checkpoint that has none of them as they are."""
    names = checkpoint.tensors()
    if not model or any(name in names for name in model):
        return []
    first = max(model, key=len)
    found = dict.fromkeys(name[: -len(first)] for name in names if name.endswith(f".{first}"))
    return [prefix for prefix in found if all(prefix + name in names for name in model)]


def _tied(model: Mapping[str, Tensor], infos: Sequence[Mapping[str, TensorInfo]]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Weights with several names: `{name: canonical name}` and `{canonical name: other names}`.

    safetensors holds a tied weight once, so the canonical name is the first that all checkpoints have.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in model.items():
        if tensor.numel():
            place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            groups.setdefault(place, []).append(name)
    canonical, aliases = {}, {}
    for names in groups.values():
        first = next((n for n in names if all(n in info for info in infos)), None)
        if len(names) > 1 and first is not None:
            canonical.update(dict.fromkeys(names, first))
            aliases[first] = tuple(n for n in names if n != first)
    return canonical, aliases


def _copies(names: Sequence[str], model: Mapping[str, object]) -> str:
    """Under what the names hold all of the model's once more (an average beside the weights); empty when they do not."""
    first = max(model, key=len)
    found = [name[: -len(first) - 1] for name in names if name.endswith(f".{first}")]
    return next((prefix for prefix in found if all(f"{prefix}.{name}" in names for name in model)), "")


def _refuse_differences(
    checkpoints: Sequence[Checkpoint],
    infos: Sequence[Mapping[str, TensorInfo]],
    model: Mapping[str, TensorInfo] | None,
    canonical: Mapping[str, str],
    ragged: bool,
) -> None:
    """Raise one MemberMismatch with every difference, by checkpoint and name, or return."""
    who = [f"checkpoint {i} ({c.path})" for i, c in enumerate(checkpoints)]
    lines, hints = _differences(checkpoints, infos, model, canonical, ragged, who)
    if lines:
        head = (
            lines[0]
            if len(lines) == 1
            else f"the members do not match, {len(lines)} differences: " + "; ".join(f"({i}) {line}" for i, line in enumerate(lines, 1))
        )
        raise MemberMismatch(" ".join([f"{head}.", *hints]))


def _differences(
    checkpoints: Sequence[Checkpoint],
    infos: Sequence[Mapping[str, TensorInfo]],
    model: Mapping[str, TensorInfo] | None,
    canonical: Mapping[str, str],
    ragged: bool,
    who: Sequence[str],
) -> tuple[list[str], list[str]]:
    """A line for every difference, and what to do about them. Weights that differ in nothing but a floating dtype are one line for all members."""
    expected, owner = (infos[0], who[0]) if model is None else (model, "the model")
    lines: list[str] = []
    hints: dict[str, None] = {}
    other_dtypes = False
    for i, info in enumerate(infos):
        missing = sorted(n for n in expected if n not in info and canonical.get(n, n) not in info)
        unexpected = sorted(n for n in info if n not in expected)
        if missing:
            lines.append(f"{who[i]} lacks {_names(missing)}, which {owner} has".strip())
        if unexpected:
            lines.append(f"{who[i]} has {_names(unexpected)}, which {owner} has not".strip())
        if missing or unexpected:
            hints["Members are of one architecture" + ("." if model is None else ", the one that --model with its arguments makes.")] = None
        if missing and model is not None and len(under := _prefixes(checkpoints[i], model)) > 1:
            keys = [prefix.rstrip(".") for prefix in under]
            hints[f"All of the model's names are in it under {', '.join(keys)}: name one, for example --key {keys[0]}."] = None
        if unexpected and model is not None and not missing and (copies := _copies(unexpected, expected)):
            hints[f"Weights of the model's names are in it under {copies} too: --key {copies} takes those."] = None
        for name in sorted(n for n in info if n in expected):
            have = info[name]
            sides = [(who[0], infos[0].get(name))] if i else []
            if model is not None:
                sides.append(("the model", model[name]))
            others = [(side, other) for side, other in sides if other is not None and _conflict(have, other, ragged)]
            if others and all(
                is_floating(have.dtype) and is_floating(o.dtype) and not _conflict(have, o._replace(dtype=have.dtype), ragged) for _, o in others
            ):
                other_dtypes = True
            elif others:
                lines.append(f"{who[i]}: {name} is {have}; " + ", ".join(f"{side} has {other}" for side, other in others))
                hints.update(dict.fromkeys(_hint(have, other) for _, other in others))
        for name, first in canonical.items():
            if name != first and name in info and info[name] == info[first] and not bit_equal(checkpoints[i].get(name), checkpoints[i].get(first)):
                lines.append(f"{who[i]}: {name} and {first} differ, but are one tensor in the model")
    if other_dtypes:
        by_dtypes: dict[str, list[str]] = {} if model is None else {_dtypes(model): ["the model"]}
        for name, info in zip(who, infos):
            by_dtypes.setdefault(_dtypes(info), []).append(name or "it")
        lines.append("the floating weights have other dtypes: " + "; ".join(f"{dtypes} in {_names(names)}" for dtypes, names in by_dtypes.items()))
        hints[f"Give --dtype {_most(infos[0])} (or another): it converts every floating weight once, and the model to it."] = None
    return lines, list(hints)


def _floating(info: Mapping[str, TensorInfo]) -> Counter[str]:
    return Counter(found.dtype for found in info.values() if is_floating(found.dtype))


def _most(info: Mapping[str, TensorInfo]) -> str:
    """The dtype that most floating weights have."""
    return _floating(info).most_common(1)[0][0]


def _dtypes(info: Mapping[str, TensorInfo]) -> str:
    """`float32`, or `bfloat16 (12 weights), float32 (2 weights)`."""
    found = _floating(info).most_common()
    return ", ".join(dtype if len(found) == 1 else f"{dtype} ({count} weight{'s' if count > 1 else ''})" for dtype, count in found)


def _conflict(have: TensorInfo, other: TensorInfo, ragged: bool) -> bool:
    return have.dtype != other.dtype or (len(have.shape) != len(other.shape) if ragged else have.shape != other.shape)


def _hint(have: TensorInfo, other: TensorInfo) -> str:
    if have.dtype != other.dtype:
        return "One weight has one dtype in all members and in the model; convert the checkpoints."
    if len(have.shape) != len(other.shape):
        return "Shapes of other ranks are another architecture."
    return "Heads of other sizes need a factory with a parameter `state_dict=` that sizes the module by the weights."


def _names(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")

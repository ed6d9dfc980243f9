"""Finds the factory that a user names, and makes fresh modules with it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from widepack_artifacts.errors import some

from ..errors import UsageError
from .checkpoint import Checkpoint
from .state_dict import an


class Factory:
    """What `--model` names. A call makes one fresh member in the mode of its constructor, with the weights
    that this draws. `eval()` follows when the checkpoint is loaded: a module's own may read the weights.

    name: as the user wrote it. args: the keyword arguments of every call. takes_state_dict: whether it has a
    parameter `state_dict` to size the module by. dtype: what the floating weights of every member are
    converted to, or None. brings_weights: whether `of` returns members with their weights, so that nothing is
    loaded into them. converts: whether files have other names or values than `load_state_dict` takes, which
    `converted` makes.
    """

    brings_weights = converts = False

    def __init__(
        self, name: str, make: Callable[..., object], args: Mapping[str, object], folder: str = ""
    ) -> None:
        self.name = name
        self.args = dict(args)
        self.takes_state_dict = "state_dict" in _parameters(make)
        self._make = make
        self._folder = folder
        self._last: weakref.ref[nn.Module] | None = None
        self.dtype: torch.dtype | None = None
        if "state_dict" in self.args:
            raise UsageError(
                f"model {name}: widepack itself passes state_dict, with each member's weights; leave this"
                " argument out"
            )

    def __repr__(self) -> str:
        return f"Factory({self.call})"

    @property
    def call(self) -> str:
        """The call as Python text: `cases.mlp:model(width=64)`."""
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.args.items())})"

    @property
    def defaults(self) -> dict[str, object]:
        """The parameters that `args` does not give, with their defaults or `inspect.Parameter.empty`."""
        named = _parameters(self._make)
        return {n: p.default for n, p in named.items() if n not in self.args and n != "state_dict"}

    def with_args(self, args: Mapping[str, object]) -> Factory:
        """Returns a factory of the same model with other arguments, beside those that it has."""
        other = Factory(self.name, self._make, {**self.args, **args}, self._folder)
        other.dtype = self.dtype
        return other

    def __call__(self, state_dict: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Makes a fresh member. state_dict: passed only to a factory with this parameter.

        Raises: UsageError.
        """
        extra = {"state_dict": state_dict} if self.takes_state_dict else {}
        try:
            with _importable(self._folder):
                module = self._make(**self.args, **extra)
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"model {self.call} raised {_raised(error)}{self._signature(error)}") from error
        if not isinstance(module, nn.Module):
            raise UsageError(f"model {self.call} returned {an(module)}; a factory returns a torch.nn.Module")
        if self._last is not None and self._last() is module:
            raise UsageError(
                f"model {self.call} returned the same module twice; a module that ran may store data,"
                " so a factory must make a fresh one"
            )
        self._last = weakref.ref(module)
        return module if self.dtype is None else module.to(self.dtype)

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """Returns a fresh member for a checkpoint's weights. Raises: UsageError.

        A factory of the user gets only the weights. Other factories read the checkpoint's file.
        """
        return self(state_dict=state_dict)

    def fresh(self, checkpoint: Checkpoint) -> nn.Module:
        """Returns a fresh member for a checkpoint that a build has read. Raises: UsageError."""
        given = checkpoint.given or checkpoint
        return self.of(given, given.mapped_state_dict())

    def converted(self, checkpoint: Checkpoint, module: nn.Module) -> Checkpoint:
        """Returns a checkpoint with the names and values that a fresh member's `load_state_dict` takes.

        Raises: MemberMismatch; UsageError.
        """
        return checkpoint

    def _signature(self, error: BaseException) -> str:
        if not isinstance(error, TypeError):
            return ""
        try:
            return f"; it takes {inspect.signature(self._make)}"
        except (TypeError, ValueError):
            return ""


class PickledModules(Factory):
    """Makes members that are pickled modules: each checkpoint contains its module.

    Every member is unpickled again from its file. So everything that is not a weight (a number in a plain
    attribute, a buffer that is not saved) is the member's own, and a build compares it
    (verification/same_program.py). Only files that were opened with `trust_pickle` have a module.
    """

    brings_weights = True

    def __init__(self) -> None:
        super().__init__("the pickled modules", _nothing, {})
        self.takes_state_dict = True  # each module has the sizes of its weights

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """Returns the module in a checkpoint's file, in its own mode. Raises: UsageError."""
        if checkpoint.module is None:
            raise UsageError(
                f"checkpoint {checkpoint.path} contains no module;"
                " name what makes the members: --model package.module:factory"
            )
        module = checkpoint.module()
        return module if self.dtype is None else module.to(self.dtype)


def _nothing() -> nn.Module:
    raise UsageError("pickled modules are read from their own files")


def load_factory(model: str | Callable[..., object], args: Mapping[str, object] | None = None) -> Factory:
    """Returns the factory that `model` names.

    model: a callable, `"pkg.mod:factory"` (the working folder is searched too) or `"path/file.py:factory"`;
    the attribute may be dotted. args: its keyword arguments. Raises: UsageError that names what cannot be
    imported or found, and the line of the user's code that failed.
    """
    if not isinstance(model, str):
        name = getattr(model, "__qualname__", None) or type(model).__name__
        return Factory(name, _checked(model, name), args or {})
    where, colon, attribute = model.rpartition(":")
    if not colon or not where or not attribute:
        raise UsageError(
            f"model {model!r} does not name a factory: write pkg.mod:factory or path/file.py:factory"
        )
    if where.endswith(".py") or os.sep in where or "/" in where:
        module, folder = _from_file(where, model)
    else:
        module, folder = _from_name(where, model), os.getcwd()
    made: object = module
    for i, part in enumerate(attribute.split(".")):
        if not hasattr(made, part):
            raise UsageError(
                f"model {model!r}: {':'.join([where, *attribute.split('.')[:i]])} has no {part!r}"
                f"{_suggestions(made, part)}"
            )
        made = getattr(made, part)
    return Factory(model, _checked(made, model), args or {}, folder)


def _checked(made: object, name: str) -> Callable[..., object]:
    if isinstance(made, nn.Module):
        raise UsageError(
            f"model {name!r} is a module, not a factory;"
            " give the class, or a function that makes a fresh module on every call"
        )
    if not callable(made):
        raise UsageError(
            f"model {name!r} is {an(made)}; a factory is a class or function that returns a torch.nn.Module"
        )
    return made


def _parameters(make: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Returns the parameters that may be given by name; {} for some builtins, which have no signature."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in parameters.items() if p.kind in kinds}


def _suggestions(owner: object, part: str) -> str:
    """Returns names that the user may have meant: classes and functions that the module defines."""
    home = getattr(owner, "__name__", "")
    made = {k: v for k, v in vars(owner).items() if inspect.isclass(v) or inspect.isfunction(v)}
    names = [k for k, v in made.items() if not k.startswith("_") and v.__module__ == home]
    close = get_close_matches(part, names, n=1)
    return (f"; did you mean {close[0]}?" if close else "." if names else "") + (
        f" It defines {some(sorted(names), 12)}." if names else ""
    )


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Puts a folder in front of sys.path inside the `with` block, as `python file.py` does."""
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
            importlib.invalidate_caches()  # finds a file that was just written
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(
                f"model {model!r}: there is no module {error.name!r}, neither installed nor in {here}"
            ) from None
        raise UsageError(f"model {model!r}: importing {name} raised {_raised(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"model {model!r}: importing {name} raised {_raised(error)}") from error


def _from_file(where: str, model: str) -> tuple[ModuleType, str]:
    path = Path(where).resolve()
    if not path.is_file():
        raise UsageError(f"model {model!r}: there is no file {where}")
    if path.suffix != ".py":
        raise UsageError(f"model {model!r}: {where} is not a Python file; write path/file.py:factory")
    # A file of a package is imported as a module of it, because of its relative imports.
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
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


def _exec_file(path: Path) -> ModuleType:
    """Imports a file without a package under a unique name, and only once, so its classes stay the same."""
    name = f"_widepack_model_{abs(hash(str(path))):x}_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__widepack_mtime__", None) == path.stat().st_mtime_ns:
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
    """Returns `ValueError: width must be even (model.py:12)`, with the last line of the user's code."""
    if isinstance(error, SystemExit):
        return "SystemExit, which ends the program; put what a script runs under `if __name__ == '__main__':`"
    words = " ".join(str(error).split())
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<frozen")]
    if own and "importlib" not in own[-1].filename:
        frame = next((f for f in reversed(own) if "site-packages" not in f.filename), own[-1])
        text += f" ({frame.filename}:{frame.lineno})"
    return text

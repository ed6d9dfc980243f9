"""Tests that everything that the pages of the Python API show has a docstring with Args, Returns, Raises and
an example, and a signature that an editor completes.

A page shows an object by `:::`. Public names of a class that are not for users are in its `filters` there.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import yaml
from paths import ROOT

import widepack

PAGES = sorted((ROOT / "docs/reference/api").glob("*.md"))
PACKAGES = ("widepack", "widepack_artifacts", "widepack_bench")
NOTHING = (None, "None", "NoReturn")
SHOWN = re.compile(r"^::: ([\w.]+)\n((?:[ ]+.*\n?)*)", re.MULTILINE)
SECTION = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Example):(?: .*)?\n((?:[ ]+.*\n?|\n)*)", re.MULTILINE
)
ENTRY = re.compile(r"^    \*{0,2}(\w+): \S", re.MULTILINE)


def resolved(name: str) -> Any:
    """Returns what a dotted name stands for: a module, or something in one."""
    parts = name.split(".")
    value = import_module(parts[0])
    for k, part in enumerate(parts[1:], 1):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = import_module(".".join(parts[: k + 1]))
    return value


@dataclass(frozen=True)
class Documented:
    """One public function, class or attribute."""

    where: str
    value: Any
    owner: type | None = None

    @property
    def function(self) -> Callable[..., Any] | None:
        """The function of a method or property; None for a class."""
        value = self.value.fget if isinstance(self.value, property) else self.value
        found: Any = getattr(value, "__func__", value)
        return None if inspect.isclass(found) else found

    @property
    def text(self) -> str:
        """The docstring as `help` shows it, of a base class where the method has none."""
        if self.owner is not None:
            for base in self.owner.__mro__:
                found = vars(base).get(self.where.rpartition(".")[2])
                if found is not None and found.__doc__:
                    return inspect.cleandoc(found.__doc__) + "\n"
            return ""
        return inspect.cleandoc(self.value.__doc__ or "") + "\n"

    @property
    def sections(self) -> dict[str, str]:
        return {name: f"{name}:\n{body}" for name, body in SECTION.findall(self.text)}

    def entries(self, *names: str) -> list[str]:
        """Returns the names that sections describe."""
        return [n for name in names for n in ENTRY.findall(self.sections.get(name, ""))]


@cache
def shown() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Returns what the pages show, by name, with the filters of its names."""
    found = {}
    for page in PAGES:
        for name, options in SHOWN.findall(page.read_text(encoding="utf-8")):
            chosen = (yaml.safe_load(textwrap.dedent(options)) or {}).get("options", {})
            found[name] = resolved(name), tuple(chosen.get("filters", ()))
    return found


def own_classes(cls: type) -> list[type]:
    """Returns the class and its bases that this project defines."""
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] in PACKAGES]


def members_of(cls: type, filters: tuple[str, ...]) -> Iterator[str]:
    """Yields the public names of methods and properties that classes of this project define."""
    for name in dict.fromkeys(name for base in own_classes(cls) for name in vars(base)):
        value = inspect.getattr_static(cls, name)
        hidden = name.startswith("_") or any(re.search(f.removeprefix("!"), name) for f in filters)
        callables = isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value)
        if callables and not hidden:
            yield name


def documented() -> dict[str, Documented]:
    """Returns every public function, class, method and property."""
    found = {}
    for name, (value, filters) in shown().items():
        values = {name: value}
        if inspect.ismodule(value):
            values = {
                f"{name}.{n}": v
                for n, v in vars(value).items()
                if inspect.isclass(v) and not n.startswith("_")
            }
        for place, one in values.items():
            found[place] = Documented(place, one)
            for n in members_of(one, filters) if inspect.isclass(one) else ():
                found[f"{place}.{n}"] = Documented(f"{place}.{n}", inspect.getattr_static(one, n), one)
    return found


ALL = documented()
METHODS = {name: d for name, d in ALL.items() if d.function is not None}


def signature(found: Documented) -> inspect.Signature:
    """Returns the signature of a function or method without `self`."""
    assert found.function is not None
    whole = inspect.signature(found.function)
    return whole.replace(parameters=[p for n, p in whole.parameters.items() if n not in ("self", "cls")])


def parameters(found: Documented) -> list[str]:
    """Returns the names of the parameters."""
    return list(signature(found).parameters)


def raises(found: Documented) -> bool:
    """Returns whether the function's own lines raise an error."""
    assert found.function is not None
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(found.function))).body
    inner = {
        n for f in ast.walk(tree) if f is not tree and isinstance(f, ast.FunctionDef) for n in ast.walk(f)
    }
    return any(isinstance(n, ast.Raise) for n in ast.walk(tree) if n not in inner)


def test_the_pages_show_every_public_name() -> None:
    errors = {name.rpartition(".")[2] for name in ALL if name.startswith("widepack.errors.")}
    names = set(widepack.__all__) - {"__version__"} - errors
    assert {f"widepack.{name}" for name in names} - set(ALL) == set()
    own = {n for n, v in vars(widepack.optim).items() if getattr(v, "__module__", "").startswith("widepack.")}
    assert {f"widepack.optim.{n}" for n in own if n[0] != "_"} - set(ALL) == set()
    assert len(METHODS) > 120


def test_everything_has_a_description_and_an_example() -> None:
    assert [name for name, d in ALL.items() if not re.match(r"[A-Z`][^\n].*?\.", d.text, re.DOTALL)] == []
    assert [name for name, d in ALL.items() if ">>> " not in d.sections.get("Example", "")] == []


def test_sections_are_those_of_the_signature() -> None:
    """A property has no Args, and its first line says what it returns."""
    functions = {n: d for n, d in METHODS.items() if not isinstance(d.value, property)}
    differ = {
        n: d.entries("Args") for n, d in functions.items() if set(d.entries("Args")) != set(parameters(d))
    }
    assert differ == {}
    returns = [n for n, d in functions.items() if signature(d).return_annotation not in NOTHING]
    assert [n for n in returns if not {"Returns", "Yields"} & set(functions[n].sections)] == []
    assert [n for n, d in METHODS.items() if raises(d) and "Raises" not in d.sections] == []


def test_classes_describe_their_attributes() -> None:
    """Fields of dataclasses are attributes too."""
    silent = []
    for name, d in ALL.items():
        if inspect.isclass(d.value):
            fields = [f for base in own_classes(d.value) for f in getattr(base, "__dataclass_fields__", ())]
            described = d.entries("Args", "Attributes")
            silent += [f"{name}.{f}" for f in dict.fromkeys(fields) if f[0] != "_" and f not in described]
    assert silent == []


def test_signatures_have_the_names_that_are_known() -> None:
    """A method has the parameters of the one that it overrides, and `**kwargs` are inputs or sizes."""
    nameless, other = [], []
    for name, d in METHODS.items():
        for p in signature(d).parameters.values():
            if (
                p.kind is p.VAR_KEYWORD
                and "Unpack" not in str(p.annotation)
                and p.name not in ("kwargs", "sizes")
            ):
                nameless.append(f"{name}(**{p.name})")
        for base in own_classes(d.owner) if d.owner is not None else ():
            overridden = vars(base).get(name.rpartition(".")[2])
            if inspect.isfunction(overridden) and parameters(Documented("", overridden)) != parameters(d):
                other.append(f"{name}, {base.__name__}")
    assert nameless == [] and other == []


def test_python_itself_has_the_docstrings() -> None:
    """Editors and notebooks show `__doc__`, also of a method that a base class documents."""
    assert [name for name, d in METHODS.items() if not d.value.__doc__] == []

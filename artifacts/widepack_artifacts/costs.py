"""Reads and evaluates the costs of a model: formulas over its dims and the number of members. No torch is
imported.

Every measure is a pair of formulas (shared, member): a call of N members costs `shared + N * member`.

| measure | unit |
|---|---|
| `flops` | FLOP of products, convolutions and attention; one multiply-add is two |
| `masked_flops` | the part of `flops` for pairs of query and key that a mask forbids at any input |
| `ops` | other operations: one for each element that an elementwise op returns or a reduction reads |
| `weights_read` | bytes of weights that kernels read |
| `acts_read`, `acts_written` | bytes of all other values that kernels read and write |
| `intermediates` | bytes of the values that are written and are no outputs |
| `kernels` | kernels that a call starts; views start none |

In formulas `w_bytes` and `a_bytes` are the bytes of one element of weights and of other values in the model's
dtype. Values of other dtypes have their own size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from . import guards as guard_forms
from . import polynomials
from .errors import ArtifactError, WidepackError
from .fields import read_choice, read_count, read_list, read_map, read_object, read_range, read_text
from .formulas import Formula, Number, formula
from .reader import Reader

STEM = "costs"


def costs_file(files: Iterable[str]) -> str:
    """Returns the name of the file of costs in an artifact's list of files; empty if it has none.

    Raises: ArtifactError for several.
    """
    found = [n for n in files if n.startswith(f"{STEM}-") and n.endswith(".json")]
    if len(found) > 1:
        raise ArtifactError(f"files: there are {len(found)} files of costs, at most one is allowed: {found}")
    return found[0] if found else ""


def stored_costs(reader: Reader) -> dict[str, Costs]:
    """Returns the costs that an artifact has, by entry; empty if it has none.

    Raises: ArtifactError if the file is damaged, or has costs of an entry that does not exist.
    """
    name = costs_file(reader.manifest.files)
    if not name:
        return {}
    try:
        found = read_documents(reader.json(name))
    except ArtifactError as e:
        raise ArtifactError(f"{reader.root / name}: {e}") from e
    if unknown := sorted(set(found) - set(reader.manifest.entries)):
        raise ArtifactError(f"{reader.root / name}: there is no entry {unknown[0][:80]!r}")
    return found


FORMAT, MASKED_FORMAT = "widepack.costs/1", "widepack.costs/2"
"""The formats of a file of costs. A file that has `masked_flops` is of the second."""
MASKED = "masked_flops"
MEASURES = (
    "flops",
    MASKED,
    "ops",
    "weights_read",
    "acts_read",
    "acts_written",
    "intermediates",
    "kernels",
)
WEIGHT_BYTES, ACTIVATION_BYTES = "w_bytes", "a_bytes"
_MOST_FORMULA = 200_000
Pair = tuple[str, str]


class OutsideDomain(WidepackError):
    """Sizes at which the formulas do not hold: outside the bounds of a dim, or against a guard.

    Example:
        >>> from pathlib import Path
        >>> from widepack_artifacts.costs import stored_costs
        >>> from widepack_artifacts.reader import Reader
        >>> costs = stored_costs(Reader(Path("ens.wide")))["forward"]
        >>> try:
        ...     costs.values({"B": -1})
        ... except widepack.errors.OutsideDomain as e:
        ...     print(e)
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class CostRow:
    """The kernels of one op in one module.

    module: the path of the module, such as `layers.0.mlp`. op: the kernel, such as `aten.addmm`. source: the
    user's line. costs: by measure; a measure that is not in it is zero.
    """

    module: str
    op: str
    source: str
    costs: Mapping[str, Pair]

    def to_json(self) -> list[Any]:
        costs = {m: list(pair) for m, pair in self.costs.items()}
        return [self.module, self.op, self.source, costs]

    @classmethod
    def from_json(cls, data: Any, where: str) -> CostRow:
        if not isinstance(data, list) or len(data) != 4:
            raise ArtifactError(f"{where}: a row has module, op, source and costs")
        module, op, source = (read_text(v, where) for v in data[:3])
        return cls(module, op, source, _read_costs(data[3], where))


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of one entry of a model.

    model: its class. torch: the version that derived them. dtype: the model's dtype. members: the name of
    the number of members in formulas. element_bytes: of the dtype. dims: each dim's least and largest size.
    guards: conditions on the dims. weights: the bytes of all weights. parameters: their elements. modules:
    the path of the module of each node of the member program. classes: the class of each module, by its
    path. rows: in the order of the program. peak: the formula of the most bytes of activations at one time.
    uncounted: ops that read numbers and have no formula, each with the number of its calls.
    """

    model: str
    torch: str
    dtype: str
    element_bytes: int
    members: str
    dims: Mapping[str, tuple[int, int | None]]
    guards: tuple[Any, ...]
    weights: Pair
    parameters: Pair
    modules: Mapping[str, str]
    classes: Mapping[str, str]
    rows: tuple[CostRow, ...]
    totals: Mapping[str, Pair]
    peak: str
    uncounted: Mapping[str, int] = field(default_factory=dict)

    @property
    def lower_bound(self) -> bool:
        """Whether totals leave something out, so that they are lower bounds."""
        return bool(self.uncounted)

    @property
    def measures(self) -> frozenset[str]:
        """The measures that are not zero."""
        return frozenset().union(*(row.costs for row in self.rows), self.totals)

    def values(
        self,
        sizes: Mapping[str, int],
        *,
        members: int = 1,
        weight_bits: int | None = None,
        activation_bits: int | None = None,
    ) -> dict[str, Number]:
        """Returns the values of all names in formulas.

        Args:
            sizes: The size of each dim.
            members: The number of members.
            weight_bits, activation_bits: Bits of one element; default those of the model's dtype.

        Raises:
            OutsideDomain: A dim has no size or is unknown, or the formulas do not hold at these sizes.
        """
        if problem := self.outside(sizes):
            raise OutsideDomain(problem)
        if members < 1:
            raise OutsideDomain(f"{self.members}={members}: a model has at least one member")
        own = 8 * self.element_bytes
        bits = {WEIGHT_BYTES: weight_bits or own, ACTIVATION_BYTES: activation_bits or own}
        return {**sizes, self.members: members, **{name: _bytes_of(n) for name, n in bits.items()}}

    def outside(self, sizes: Mapping[str, int]) -> str:
        """Returns why the formulas do not hold at these sizes; empty where they hold."""
        if missing := [d for d in self.dims if d not in sizes]:
            return f"no size for {', '.join(missing)}; this model's dims are {self.domain()}"
        if unknown := [d for d in sizes if d not in self.dims]:
            return f"unknown: {', '.join(unknown)}; this model's dims are {self.domain() or 'none'}"
        for dim, (least, most) in self.dims.items():
            if sizes[dim] < least or (most is not None and sizes[dim] > most):
                return f"{dim}={sizes[dim]} is outside {_range_text(dim, (least, most))}"
        for guard in self.guards:
            if not guard_forms.holds(guard, sizes):
                at = ", ".join(f"{d}={sizes[d]}" for d in sorted(guard_forms.letters(guard)))
                return f"the model needs {guard_forms.text(guard)}, which is false at {at}"
        return ""

    def domain(self) -> str:
        """Returns the bounds of the dims as text: `B >= 1, 2 <= T <= 512`."""
        return ", ".join(_range_text(d, r) for d, r in self.dims.items())

    def at(self, values: Mapping[str, Number]) -> dict[str, Number]:
        """Returns the totals, and `weights`, `parameters` and `peak`. values: as `values()` returns them."""
        found = {m: self.evaluate(self.totals.get(m, ("0", "0")), values) for m in MEASURES}
        for name, pair in (("weights", self.weights), ("parameters", self.parameters)):
            found[name] = self.evaluate(pair, values)
        return found | {"peak": formula(self.peak).at(values)}

    def evaluate(self, pair: Pair, values: Mapping[str, Number]) -> Number:
        """Returns `shared + N * member` of a pair of formulas."""
        return formula(pair[0]).at(values) + values[self.members] * formula(pair[1]).at(values)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "torch": self.torch,
            "dtype": self.dtype,
            "element_bytes": self.element_bytes,
            "members": self.members,
            "dims": {d: list(r) for d, r in self.dims.items()},
            "guards": list(self.guards),
            "weights": list(self.weights),
            "parameters": list(self.parameters),
            "modules": dict(self.modules),
            "classes": dict(self.classes),
            "rows": [row.to_json() for row in self.rows],
            "totals": {m: list(pair) for m, pair in self.totals.items()},
            "peak": self.peak,
            "uncounted": dict(self.uncounted),
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "costs") -> Costs:
        """Reads the costs of an entry. Raises: ArtifactError."""
        d = read_object(data, where, tuple(cls.__dataclass_fields__))
        dims = read_map(d["dims"], f"{where}: dims", read_range)
        guards = tuple(read_list(d["guards"], f"{where}: guards", lambda v, _: v))
        for guard in guards:
            guard_forms.check(guard, dims)
        found = cls(
            model=read_text(d["model"], where),
            torch=read_text(d["torch"], where),
            dtype=read_text(d["dtype"], where),
            element_bytes=read_count(d["element_bytes"], where),
            members=read_text(d["members"], where),
            dims=dims,
            guards=guards,
            weights=_read_pair(d["weights"], f"{where}: weights"),
            parameters=_read_pair(d["parameters"], f"{where}: parameters"),
            modules=read_map(d["modules"], f"{where}: modules", read_text),
            classes=read_map(d["classes"], f"{where}: classes", read_text),
            rows=tuple(read_list(d["rows"], f"{where}: rows", CostRow.from_json)),
            totals=_read_costs(d["totals"], f"{where}: totals"),
            peak=_read_formula(d["peak"], f"{where}: peak").text,
            uncounted=read_map(d["uncounted"], f"{where}: uncounted", read_count),
        )
        found._check_names(where)
        return found

    def _check_names(self, where: str) -> None:
        """Refuses formulas that read other names than the dims, the members and the bytes of an element."""
        known = {*self.dims, self.members, WEIGHT_BYTES, ACTIVATION_BYTES}
        pairs = [self.weights, self.parameters, *self.totals.values()]
        pairs += [pair for row in self.rows for pair in row.costs.values()]
        for text in dict.fromkeys([self.peak, *(t for pair in pairs for t in pair)]):
            if unknown := formula(text).names - known:
                raise ArtifactError(
                    f"{where}: the formula {text[:80]!r} reads {sorted(unknown)[0][:60]!r}, which is no dim"
                )


def documents(entries: Mapping[str, Costs]) -> dict[str, Any]:
    """Returns the JSON document of `costs.json`: the costs of every entry.

    The format is the lowest that has all its measures.
    """
    masked = any(MASKED in costs.measures for costs in entries.values())
    return {
        "format": MASKED_FORMAT if masked else FORMAT,
        "entries": {name: costs.to_json() for name, costs in entries.items()},
    }


def read_documents(data: Any) -> dict[str, Costs]:
    """Reads the JSON document of `costs.json`. Raises: ArtifactError."""
    d = read_object(data, "costs", ("format", "entries"))
    if d["format"] not in (FORMAT, MASKED_FORMAT):
        raise ArtifactError(
            f"costs: format {str(d['format'])[:60]!r}, this widepack reads {FORMAT!r} and {MASKED_FORMAT!r}"
        )
    found = read_map(d["entries"], "costs: entries", Costs.from_json)
    if d["format"] == FORMAT and any(MASKED in costs.measures for costs in found.values()):
        raise ArtifactError(f"costs: {MASKED} is a measure of {MASKED_FORMAT!r}, not of {FORMAT!r}")
    return found


def added(pairs: Iterable[Pair]) -> Pair:
    """Returns the sum of pairs of formulas as one pair of formulas."""
    kept = list(pairs)
    return polynomials.added(p[0] for p in kept), polynomials.added(p[1] for p in kept)


def _bytes_of(bits: int) -> Number:
    found = Fraction(bits, 8)
    return found.numerator if found.denominator == 1 else found


def _range_text(dim: str, bounds: tuple[int, int | None]) -> str:
    least, most = bounds
    return f"{dim} >= {least}" if most is None else f"{least} <= {dim} <= {most}"


def _read_formula(value: Any, where: str) -> Formula:
    return formula(read_text(value, where, _MOST_FORMULA))


def _read_pair(value: Any, where: str) -> Pair:
    if not isinstance(value, list) or len(value) != 2:
        raise ArtifactError(f"{where}: expected [shared, member], got {str(value)[:60]}")
    return _read_formula(value[0], where).text, _read_formula(value[1], where).text


def _read_costs(value: Any, where: str) -> dict[str, Pair]:
    found = read_map(value, where, _read_pair)
    for measure in found:
        read_choice(measure, MEASURES, where)
    return found

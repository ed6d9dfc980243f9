"""Turns sizes into formulas over named dims, and formulas into text that `widepack_artifacts.formulas` reads.

A size of a symbolic tensor is a sympy expression over torch's symbols. `SizeSymbols` renames these to the
dims. A count is kept as a pair (shared, member); `N` is not a symbol of torch, so it is never in a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

from widepack_artifacts.costs import ACTIVATION_BYTES, WEIGHT_BYTES
from widepack_artifacts.formulas import Formula

from ..errors import WidepackError
from ..ir.values import expression

W = sympy.Symbol(WEIGHT_BYTES, integer=True, positive=True)
A = sympy.Symbol(ACTIVATION_BYTES, integer=True, positive=True)
ZERO = sympy.Integer(0)
_FACTORED = 60
"""The most terms of a formula that is factored for its text."""
_MOST_SUBTRACTED = 20
"""The most terms that a sum subtracts one by one."""


class SizeSymbols:
    """Names for torch's symbols. dtype: the model's dtype, whose elements have `w_bytes` or `a_bytes`."""

    def __init__(self, dims: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.dtype = dtype
        symbols = {
            name: sympy.Symbol(name, integer=True, positive=True)
            for name, size in dims.items()
            if not isinstance(size, int)
        }
        self._names = {expression(dims[name]): symbol for name, symbol in symbols.items()}
        self._known = {*symbols.values(), W, A}
        self._expanded: dict[Any, Any] = {}
        self._texts: dict[Any, str] = {}

    def expr(self, size: Any) -> Any:
        """Returns a size as an expanded expression over the named dims."""
        if isinstance(size, int):
            return sympy.Integer(size)
        found = size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size)
        if found not in self._expanded:
            self._expanded[found] = sympy.expand(found.xreplace(self._names))
        return self._expanded[found]

    def is_known(self, expr: Any) -> bool:
        """Whether an expression reads nothing but dims: no size that only values determine."""
        return bool(expr.free_symbols <= self._known)

    def element(self, dtype: torch.dtype, weight: bool) -> Any:
        """Returns the bytes of one element: a symbol for elements of the model's dtype."""
        if dtype == self.dtype:
            return W if weight else A
        return sympy.Integer(dtype.itemsize)

    def bytes_read(self, tensor: torch.Tensor, weight: bool) -> Any:
        """Returns the bytes of a tensor that a kernel reads; an expanded dim counts once."""
        count: Any = sympy.Integer(1)
        for size, step in zip(tensor.shape, tensor.stride(), strict=True):
            if not (isinstance(step, int) and step == 0):
                count *= self.expr(size)
        return sympy.expand(count * self.element(tensor.dtype, weight))

    def text(self, expr: Any) -> str:
        """Returns a formula as text, factored where that is quick. Raises: WidepackError for a function that
        formulas do not have.
        """
        if expr not in self._texts:
            self._texts[expr] = _checked(_Printer().doprint(_factored(expr)))
        return self._texts[expr]

    def longest(self, exprs: Iterable[Any]) -> str:
        """Returns the text of the maximum of expressions, without those that another one never is below."""
        kept: list[Any] = []
        for expr in sorted(set(exprs), key=lambda e: -len(sympy.Add.make_args(e))):
            if not any(_never_below(other, expr) for other in kept):
                kept = [k for k in kept if not _never_below(expr, k)] + [expr]
        texts = sorted(map(self.text, kept))
        return texts[0] if len(texts) == 1 else f"max({', '.join(texts)})" if texts else "0"


def _never_below(a: Any, b: Any) -> bool:
    """Whether `a >= b` at all sizes of at least 1, because no coefficient of a polynomial falls."""
    difference = sympy.expand(a - b)
    return all(t.is_nonnegative for t in sympy.Add.make_args(difference))


def _factored(expr: Any) -> Any:
    if not expr.free_symbols or len(sympy.Add.make_args(expr)) > _FACTORED:
        return expr
    if expr.has(sympy.Max, sympy.Min):
        return expr  # each is one more variable, and the time to factor is exponential in their number
    try:
        return sympy.factor(expr)
    except sympy.PolynomialError:
        return expr


class _Printer(StrPrinter):  # type: ignore[misc]  # sympy has no types
    """Prints formulas as Python writes them; `sympy` prints polynomials so already."""

    def _print_Add(self, expr: Any, order: Any = None) -> str:
        """Puts the negative terms of a long sum into parentheses: a reader nests `-` once for each."""
        terms = self._as_ordered_terms(expr, order=order)
        negative = [t for t in terms if t.could_extract_minus_sign()]
        if len(negative) <= _MOST_SUBTRACTED or len(negative) == len(terms):
            return str(super()._print_Add(expr, order))
        kept = [t for t in terms if not t.could_extract_minus_sign()]
        first, rest = (sympy.Add(*ts, evaluate=False) for ts in (kept, [-t for t in negative]))
        return f"{super()._print_Add(first)} - ({super()._print_Add(rest)})"

    def _infix(self, expr: Any, sign: str) -> str:
        left, right = (self.parenthesize(a, PRECEDENCE["Pow"]) for a in expr.args)
        return f"({left} {sign} {right})"

    def _print_FloorDiv(self, expr: Any) -> str:  # sympy finds these methods by their names
        return self._infix(expr, "//")

    def _print_Mod(self, expr: Any) -> str:
        return self._infix(expr, "%")

    def _print_ModularIndexing(self, expr: Any) -> str:
        base, divisor, modulus = (self.parenthesize(a, PRECEDENCE["Pow"]) for a in expr.args)
        return f"({base} // {divisor} % {modulus})"

    def _of_arguments(self, name: str, expr: Any) -> str:
        return f"{name}({', '.join(self.doprint(a) for a in expr.args)})"

    def _print_Max(self, expr: Any) -> str:
        return self._of_arguments("max", expr)

    def _print_Min(self, expr: Any) -> str:
        return self._of_arguments("min", expr)

    _print_CleanDiv = _print_FloorDiv
    _print_PythonMod = _print_Mod


def _checked(text: str) -> str:
    try:
        return Formula(text).text
    except WidepackError as e:
        raise WidepackError(f"a size of this model has no formula: {e}") from None

"""Reduces the answer of a call to the requested figures: chooses the leaf, and checks it.

`AnswerStream` reduces the answers of a loop over members while the loop runs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.entry import OutputLeaf

from ..errors import InputError, UsageError
from ..reduction.calibration import Calibration
from ..reduction.figures import check_answers, normalised, requested
from ..reduction.reduce import Stream, mixture, reduced
from ..reduction.sums import StreamedSums
from .output import Output
from .programs.bound_program import BoundProgram

MIXTURE = "mixture"


class Reduction:
    """What `reduce` was called with, checked as far as it can be before the members run.

    Args:
        names: The requested figures, in the order of the caller.
        of, weights, dim, output: As `reduce` takes them.
        members: The numbers of the members that count; None: all.

    Attributes:
        wanted: The figures of one leaf: all but `mixture`.
        calibration: What is applied to the figures; None for nothing.

    Raises:
        UsageError: A figure or an option is unknown.
    """

    def __init__(
        self,
        names: Sequence[str],
        of: str | None,
        weights: Any = None,
        dim: int = -1,
        output: str | int | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        self.wanted = requested([n for n in names if n != MIXTURE], of, weights is not None)
        if MIXTURE in names and (of is not None or output is not None):
            raise UsageError(
                "mixture reads the first two outputs as they are: request it without of= and output="
            )
        if type(dim) is not int:
            raise UsageError(f"dim={dim!r:.60} is not a whole number")
        if members is not None and (not members or len(set(members)) != len(members)):
            raise UsageError("members= names each member once, and at least one")
        self.names = tuple(dict.fromkeys(names))
        self.of, self.weights, self.dim, self.output = of, weights, dim, output
        self.members = None if members is None else tuple(members)
        self.calibration: Calibration | None = None

    def calibrate(self, calibration: Calibration, leaves: Sequence[OutputLeaf]) -> None:
        """Applies a calibration to the figures.

        leaves: the outputs in the manifest. Raises: UsageError if the calibration is not of these figures.
        """
        output = leaves[_leaf_number(leaves, self.output)].name
        some = self.weights is not None or self.members is not None
        calibration.check(self.names, self.of, self.dim, output, some)
        if "entropy" in self.names:
            self.wanted = requested([*(w.text for w in self.wanted), "mean"], self.of, False)
        self.calibration = calibration

    def __str__(self) -> str:
        """The reduction in words, with every weight: equal reductions have equal texts."""
        given = self.weights.tolist() if hasattr(self.weights, "tolist") else self.weights
        parts = f"of={self.of!r}, weights={given}, members={self.members}, dim={self.dim}"
        return f"reduce({', '.join(self.names)}, {parts}, output={self.output!r}, {self.calibration})"

    @property
    def streamed(self) -> bool:
        """Whether the figures can be computed while members answer one after the other."""
        return MIXTURE not in self.names and all(w.figure.streamed for w in self.wanted)

    def stream(self, answer: Tensor, leaves: Sequence[OutputLeaf], members: int) -> Stream:
        """Returns a stream for N members' answers. answer: the first. members: N. Raises: as `apply`."""
        dim = self.dim_of_classes(answer.unsqueeze(0), leaves)
        return Stream(self.wanted, self.of, dim - 1, self.shares(answer, members), self.weights is None)

    def shares(self, answer: Tensor, members: int) -> dict[int, float]:
        """Returns the weight of each member that counts, by its number; 1 for all without weights.

        answer: any of the answers. members: N. Raises: UsageError.
        """
        numbers = range(members) if self.members is None else self.members
        weights = normalised(self.weights, len(numbers), answer)
        shares = [1.0] * len(numbers) if weights is None else weights.tolist()
        return {n: share for n, share in zip(numbers, shares) if share}

    def ordered(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Returns figures in the order of the caller, and calibrated if that was requested."""
        if self.calibration is not None:
            found = self.calibration.applied(found)
        return {name: found[name] for name in self.names}

    def apply(self, answer: Any, leaves: Sequence[OutputLeaf], one_shape: bool) -> dict[str, Any]:
        """Returns the figures of an answer by their names.

        leaves: the outputs in the manifest. one_shape: whether the members' tensors of a list have one shape.
        Raises: InputError, UsageError.
        """
        found: dict[str, Any] = {}
        if self.wanted:
            values = self.leaf(answer, leaves, one_shape)
            dim = self.dim_of_classes(values, leaves)
            values, weights = self._counted(values)
            found.update(reduced(values, self.wanted, self.of, dim, weights))
        if MIXTURE in self.names:
            found[MIXTURE] = self._mixture(answer, one_shape)
        return self.ordered(found)

    def leaf(self, answer: Any, leaves: Sequence[OutputLeaf], one_shape: bool) -> Tensor:
        """Returns the leaf `[N, ...]` that the figures are of. Raises: InputError, UsageError."""
        return _tensor(_leaf(answer, self.output, leaves[0].kind == "ragged"), one_shape)

    def dim_of_classes(self, values: Tensor, leaves: Sequence[OutputLeaf]) -> int:
        """Returns the dim of the classes in `[N, ...]`. Raises: as `check_answers`."""
        dims = _dims(leaves, self.output)
        rows = bool(dims) and len(dims) == values.dim() - 1 and self.dim % len(dims) == 0
        return check_answers(values, self.wanted, self.of, self.dim, rows and not dims[0].isdigit())

    def _counted(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the answers of the members that count, and their weights. A member whose weight is 0 does
        not count, whatever it answers.
        """
        if self.members is not None:
            values = values[list(self.members)]
        weights = normalised(self.weights, values.shape[0], values)
        if weights is not None and not bool(weights.all()):
            values, weights = values[weights > 0], weights[weights > 0]
        return values, weights

    def _mixture(self, answer: Any, one_shape: bool) -> tuple[Tensor, Tensor]:
        means, variances = means_and_variances(answer, one_shape)
        means, weights = self._counted(means)
        return mixture(means, self._counted(variances)[0], weights)


def means_and_variances(answer: Any, one_shape: bool) -> tuple[Tensor, Tensor]:
    """Returns the two leaves `[N, ...]` of an answer that `mixture` reads. Raises: InputError."""
    if isinstance(answer, Mapping):
        answer = list(answer.values())
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise InputError("mixture needs members that answer two tensors: means and variances")
    means, variances = (_tensor(part, one_shape) for part in answer)
    for values in (means, variances):
        check_answers(values, requested(["min"], None, False), None, -1, rows=False)
    if means.shape != variances.shape:
        raise InputError(
            f"the means have the shape {list(means.shape)}, the variances {list(variances.shape)}: "
            "mixture needs a variance for each mean"
        )
    return means, variances


def _leaf(answer: Any, output: str | int | None, ragged: bool) -> Any:
    """Returns the requested leaf of an answer. ragged: whether the first output is a list of N tensors."""
    if isinstance(answer, (Output, Mapping)):
        names = list(answer)
        if output is None:
            return answer["logits" if "logits" in answer else names[0]]
        if output in names:
            return answer[output]
        if type(output) is int and 0 <= output < len(names):
            return answer[names[output]]
        raise UsageError(f"output={output!r} is unknown; the members answer {', '.join(names)}")
    if output is None:
        while isinstance(answer, (tuple, list)) and answer and not ragged:
            answer = answer[0]
        return answer
    leaves = answer if isinstance(answer, (tuple, list)) and not ragged else [answer]
    if type(output) is not int or not 0 <= output < len(leaves):
        raise UsageError(f"output={output!r} is unknown; the members answer {len(leaves)}, numbered from 0")
    return leaves[output]


def _tensor(leaf: Any, one_shape: bool) -> Tensor:
    """Returns the answers `[N, ...]` of a leaf. Raises: InputError for tensors of several shapes."""
    if isinstance(leaf, list) and one_shape and len({y.shape for y in leaf}) == 1:
        leaf = torch.stack(leaf)
    if not isinstance(leaf, Tensor) or not leaf.dim():
        raise InputError(
            "the members' outputs differ in shape, or are not tensors: they have no mean. Combine the "
            "members' answers in your own code"
        )
    return leaf


def _dims(leaves: Sequence[OutputLeaf], output: str | int | None) -> list[str]:
    """Returns the dims of a leaf in one member, as the manifest has them."""
    inside = leaves[_leaf_number(leaves, output)].type.partition("[")[2].rstrip("]")
    return [d.strip() for d in inside.split(",") if d.strip()]


def _leaf_number(leaves: Sequence[OutputLeaf], output: str | int | None) -> int:
    """Returns the number of a leaf in the manifest; that of a leaf for a number or a name that none has."""
    names = [leaf.name for leaf in leaves]
    wanted = "logits" if output is None and "logits" in names else output
    number = wanted if type(wanted) is int else names.index(wanted) if wanted in names else 0
    return max(0, min(number, len(leaves) - 1))


LARGE = 4 * 2**20
"""Bytes of all answers from which on they are added one after the other. Fewer are kept until the last."""


class AnswerStream:
    """A call whose answers are reduced while members run one after the other.

    Args:
        reduction: What is requested.
        leaves: The outputs in the manifest.
        members: N.
        program: The program; its answer is the result of a loop.
        result: The loop and the number of its result.
    """

    def __init__(
        self,
        reduction: Reduction,
        leaves: Sequence[OutputLeaf],
        members: int,
        program: BoundProgram,
        result: tuple[str, int],
    ) -> None:
        self._reduction, self._leaves, self._members = reduction, leaves, members
        self._program, self._result = program, result
        self._lock = threading.Lock()
        self._kept: dict[int, torch.Tensor] = {}
        self._stream: Stream | None = None

    def run(self, *values: Any) -> None:
        """Runs the members. values: the inputs of the program."""
        self._program.executable.stream(self._result, self._take, *values)

    def _take(self, member: int, answer: torch.Tensor) -> None:
        with self._lock:
            if self._stream is None and answer.nbytes * self._members < LARGE:
                self._kept[member] = answer
                return
            if self._stream is None:
                self._stream = self._reduction.stream(answer, self._leaves, self._members)
        self._stream.take(member, answer)

    def figures(self) -> dict[str, Any]:
        """Returns the figures by their names. Raises: InputError, UsageError."""
        if self._stream is not None:
            return self._reduction.ordered(self._stream.figures())
        answers = torch.stack([self._kept[i] for i in range(self._members)])
        return self._reduction.apply(answers, self._leaves, one_shape=False)

    def sums(self) -> StreamedSums | Tensor:
        """Returns what is summed up, or all answers `[N, ...]` if they are few and were kept."""
        if self._stream is not None:
            return self._stream.sums
        return torch.stack([self._kept[i] for i in range(self._members)])

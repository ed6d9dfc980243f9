"""Defines the reductions over members that a loaded model has, and each of its entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError


class Reductions(ABC):
    """Reduces the members' answers to figures of the ensemble, in one forward."""

    @abstractmethod
    def reduce(
        self,
        *args: Any,
        of: str | None = None,
        weights: Sequence[float] | None = None,
        members: Sequence[int | str] | None = None,
        dim: int = -1,
        output: str | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs all members once, and returns figures of their answers.

        v_i is what a figure is computed of for member i, p_i are its probabilities, w_i its weight (1/N
        without weights), n_c the number of members that choose class c, and H(p) = -sum_c p_c log p_c.

        | figure | formula |
        |---|---|
        | `mean` | sum_i w_i v_i |
        | `var`, `std` | sum_i w_i (v_i - mean)^2, and its square root |
        | `min`, `max` | over members |
        | `median`, `quantile(q)` | linear between two members; the median is `quantile(0.5)` |
        | `vote` | the class with the most votes, the lowest if several have as many |
        | `votes` | n_c for each class, or the sum of the weights |
        | `entropy` | H(sum_i w_i p_i) |
        | `expected_entropy` | sum_i w_i H(p_i) |
        | `mutual_information` | entropy - expected_entropy, at least 0 |
        | `disagreement` | 1 - sum_c n_c (n_c - 1) / (N (N - 1)) |
        | `variation_ratio` | 1 - max_c n_c / N |
        | `mixture` | (m, sum_i w_i (s_i + m_i^2) - m^2), m = sum_i w_i m_i; members answer (m_i, s_i) |

        With of='sigmoid' each label is a decision of its own: H is that of one label, and members vote yes or
        no.

        Args:
            *args: As a call takes them, and after them the names of figures.
            of: What the figures are computed of: None for the answers themselves, `softmax` for the scores
                of classes, `sigmoid` for the scores of labels, `probabilities` for answers that are
                probabilities already.
            weights: One weight for each member, or for each of `members`. Default: all are equal.
            members: The members that count, by number or name. Default: all. All members run.
            dim: The dim of the classes in a member's answer.
            output: The leaf of an answer with several: its name, or its number. Default: `logits`, else the
                first.
            **kwargs: As a call takes them. An input of the model that is called as one of the options is
                given by position.

        Returns:
            A dict with a tensor for each figure, of the member's own shape, without the dim of the classes
            where a figure has none. Answers in half precision give figures in float32. For an entry with
            states: (dict, new state).

        Raises:
            InputError: The inputs do not match, or a figure is not defined for these answers.
            UsageError: A figure or an option is unknown, or `of` is needed.

        Example:
            >>> r = ens.reduce(x, "mean", "mutual_information", of="softmax")
            >>> p, doubt = r["mean"], r["mutual_information"]  # [B, classes], [B]
        """

    def mean(
        self, *args: Any, of: str | None = None, weights: Sequence[float] | None = None, **kwargs: Any
    ) -> Any:
        """Returns the mean of the members' answers: `reduce(..., "mean")["mean"]`.

        Args:
            *args: As a call takes them.
            of: What is averaged: None for the answers themselves, `softmax` for probabilities of classes (the
                usual mean of classifiers), `sigmoid`.
            weights: One weight for each member. Default: all are equal.
            **kwargs: As a call takes them, and the options of `reduce`.

        Returns:
            A tensor of the member's own shape; (mean, new state) for an entry with states.

        Raises:
            InputError: The inputs do not match, or the members' outputs have no mean: their shapes differ, or
                they are whole numbers.
            UsageError: `of` is unknown, or the weights are not N numbers.

        Example:
            >>> p = ens.mean(x, of="softmax")  # [B, classes]
        """
        return self._one("mean", args, {"of": of, "weights": weights, **kwargs})

    def std(self, *args: Any, of: str | None = None, **kwargs: Any) -> Any:
        """Returns the standard deviation of the members' answers (divided by N): `reduce(..., "std")["std"]`.

        Args:
            *args: As a call takes them.
            of: As `mean` takes it.
            **kwargs: As a call takes them, and the options of `reduce`.

        Returns:
            A tensor of the member's own shape; (deviation, new state) for an entry with states.

        Raises:
            InputError: As `mean`.
            UsageError: As `mean`.
        """
        return self._one("std", args, {"of": of, **kwargs})

    def vote(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the class that most members choose: `reduce(..., "vote")["vote"]`. The lowest number wins a
        tie.

        Args:
            *args: As a call takes them.
            **kwargs: As a call takes them, and the options of `reduce`.

        Returns:
            The classes; (classes, new state) for an entry with states.

        Raises:
            InputError: As `reduce`: members that answer one number for each row have no classes.
            UsageError: As `reduce`.
        """
        return self._one("vote", args, kwargs)

    def _one(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        found = self.reduce(*args, name, **kwargs)
        return (found[0][name], found[1]) if isinstance(found, tuple) else found[name]


def names_apart(args: Sequence[Any]) -> tuple[Sequence[Any], list[str]]:
    """Returns the inputs of a call, and the names of figures after them. Raises: UsageError without names."""
    count = len(args)
    while count and isinstance(args[count - 1], str):
        count -= 1
    if count == len(args):
        raise UsageError("reduce needs the names of figures after the inputs, for example reduce(x, 'mean')")
    return args[:count], list(args[count:])

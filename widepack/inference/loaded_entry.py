"""Defines what every entry of a loaded model can do, wherever its members are"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from widepack_artifacts.entry import Entry
from widepack_artifacts.manifest import Manifest

from ..errors import UsageError
from ..planning.plan import Plan
from ..reduction.calibration import Calibration
from ..spec.names import number_of
from .binder import NamedInputs
from .calibration_record import AGAIN, calibration_of
from .graph_pool import GraphUse
from .members.member import Member
from .reduced_answer import Reduction

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy import ndarray

    MemberOfEachRow: TypeAlias = (
        torch.Tensor | ndarray[Any, Any] | Sequence[int | str | torch.Tensor] | int | str
    )


class ModelCalls(NamedInputs, ABC):
    """What a loaded model and each of its entries answer, wherever the members are.

    A method or property of a subclass has the docstring of the one that it overrides.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if isinstance(value, (property, FunctionType)) and value.__doc__ is None:
                overridden = (vars(base)[name] for base in cls.__mro__[1:-1] if name in vars(base))
                value.__doc__ = next((found.__doc__ for found in overridden if found.__doc__), None)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members. They share every input that is not marked with `widepack.each`.

        Args:
            *args: The inputs as the member's method takes them. Dtype, device and sizes must match the
                artifact.
            **kwargs: The same by name, and `state` for a model with states: `{name: [N, ...]}`.

        Returns:
            The member's own structure. Every leaf is `[N, *shape]`, where `shape` is that of the member's
            leaf; a list of N tensors if the members' shapes differ. For a model with states: (answer, new
            state). A state has one value for each member in every pattern.

        Raises:
            InputError: The inputs do not match the entry. Nothing has run then.
            UsageError: The model was closed.

        Example:
            >>> y = ens(x)  # x: [B, 8], y: [N, B, 3]
            >>> y, state = ens(x, state=ens.state())  # with states
        """

    @abstractmethod
    def each(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members, each on separate inputs: member i gets `[i]` of every input.

        Args:
            *args: For each input of the member a tensor `[N, ...]`, or a list of N tensors of one shape.
            **kwargs: The same by name, and `state` for a model with states.

        Returns:
            As a call returns.

        Raises:
            InputError: The inputs do not match the entry. Nothing has run then.
            UsageError: The model was closed.

        Example:
            >>> y = ens.each(xs)  # xs: [N, B, 8], y: [N, B, 3]
        """

    @abstractmethod
    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        """Returns the states of this entry as they begin.

        Args:
            **sizes: The size of each dim of the states that are inputs, for example `B=8`.

        Returns:
            `{name: [N, ...]}`: a buffer as each member's checkpoint has it, zeros for an input.

        Raises:
            UsageError: A size is missing, or the model was closed.

        Example:
            >>> state = ens.state()
        """

    @abstractmethod
    def member(self, member: int | str) -> Member:
        """Returns one member as a plain module. Its weights share memory with this model.

        Args:
            member: The member's number or name.

        Returns:
            A `Member`.

        Raises:
            UsageError: No loaded member has this number or name, or the model was closed.

        Example:
            >>> y0 = ens.member(0)(x)
        """

    @abstractmethod
    def route(self, *args: Any, member: MemberOfEachRow, **kwargs: Any) -> Any:
        """Runs each row of a batch by one member.

        Row b of the answer is what the member `member[b]` answers for row b of the inputs, within the
        recorded bounds, whatever other rows are in the batch. Only members with rows run. Layers whose
        weights all members share run once on all rows.

        A model is routed only if its rows are independent, so that no row changes the answer to another one.
        `build` examines that and records it. `ens(x)` and `ens.each(xs)` do not need it.

        Args:
            *args: The inputs as the member's method takes them, without a member axis. Inputs with the dim of
                the batch have one row for each answer; all rows share the others.
            member: The member of each row: B numbers or names, as a tensor, an array or a list. A single
                number or name is for all rows.
            **kwargs: The inputs by name. An input of the model that is called `member` is given by position.

        Returns:
            The member's own structure, in the order of the rows, without a member axis. A leaf is a list of B
            tensors if the shapes of the answers differ.

        Raises:
            InputError: The inputs do not match the entry, or `member` has no member for each row.
            UsageError: The entry cannot be routed: its rows are not independent, it has states, or it draws
                random numbers. Or a name is unknown, or the model was closed.
            ArtifactError: A program of the file does not match what the manifest says of it: types, or the
                number of rows of an answer.

        Example:
            >>> y = ens.route(x, member=[3, 0, 3])  # x: [3, 8], y: [3, 10]
            >>> y = ens.route(x, member=["rome", "paris", "rome"])
        """

    # ---------------------------------------------------------------- figures of the ensemble

    @abstractmethod
    def reduce(
        self,
        *args: Any,
        of: str | None = None,
        weights: Sequence[float] | None = None,
        members: Sequence[int | str] | None = None,
        dim: int = -1,
        output: str | int | None = None,
        calibrated: bool = False,
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
            calibrated: Whether the calibration that `widepack.evaluate` recorded is applied: a temperature to
                `mean` and `entropy` of classes, a factor to `var` and `std` of numbers.
            **kwargs: As a call takes them. An input of the model that is called as one of the options is
                given by position.

        Returns:
            A dict with a tensor for each figure, of the member's own shape, without the dim of the classes
            where a figure has none. Answers in half precision give figures in float32. For an entry with
            states: (dict, new state).

        Raises:
            InputError: The inputs do not match, or a figure is not defined for these answers.
            UsageError: A figure or an option is unknown, `of` is needed, or no calibration is recorded for
                these members and options.

        Example:
            >>> r = ens.reduce(x, "mean", "mutual_information", of="softmax")
            >>> p, doubt = r["mean"], r["mutual_information"]  # [B, classes], [B]
        """

    def mean(
        self,
        *args: Any,
        of: str | None = None,
        weights: Sequence[float] | None = None,
        members: Sequence[int | str] | None = None,
        output: str | int | None = None,
        calibrated: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the mean of the members' answers: `reduce(..., "mean")["mean"]`.

        Args:
            *args: As a call takes them.
            of: What is averaged: None for the answers themselves, `softmax` for probabilities of classes (the
                usual mean of classifiers), `sigmoid`.
            weights: One weight for each member, or for each of `members`. Default: all are equal.
            members: The members that count, by number or name. Default: all.
            output: The leaf of an answer with several, as `reduce` takes it.
            calibrated: As `reduce` takes it.
            **kwargs: As a call takes them, and the other options of `reduce`.

        Returns:
            A tensor of the member's own shape; (mean, new state) for an entry with states.

        Raises:
            InputError: The inputs do not match, or the members' outputs have no mean: their shapes differ, or
                they are whole numbers.
            UsageError: `of` is unknown, or the weights are not N numbers.

        Example:
            >>> p = ens.mean(x, of="softmax")  # [B, classes]
        """
        options = {"of": of, "weights": weights, "members": members, "output": output}
        return self._one("mean", args, {**options, "calibrated": calibrated, **kwargs})

    def std(
        self,
        *args: Any,
        of: str | None = None,
        weights: Sequence[float] | None = None,
        members: Sequence[int | str] | None = None,
        output: str | int | None = None,
        calibrated: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the standard deviation of the members' answers (divided by N): `reduce(..., "std")["std"]`.

        Args:
            *args: As a call takes them.
            of: As `mean` takes it.
            weights: As `mean` takes them.
            members: As `mean` takes them.
            output: As `mean` takes it.
            calibrated: As `reduce` takes it.
            **kwargs: As a call takes them, and the other options of `reduce`.

        Returns:
            A tensor of the member's own shape; (deviation, new state) for an entry with states.

        Raises:
            InputError: As `mean`.
            UsageError: As `mean`.

        Example:
            >>> spread = ens.std(x, of="softmax")  # [B, classes]
        """
        options = {"of": of, "weights": weights, "members": members, "output": output}
        return self._one("std", args, {**options, "calibrated": calibrated, **kwargs})

    def vote(
        self,
        *args: Any,
        weights: Sequence[float] | None = None,
        members: Sequence[int | str] | None = None,
        dim: int = -1,
        output: str | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns the class that most members choose: `reduce(..., "vote")["vote"]`. The lowest number wins a
        tie.

        Args:
            *args: As a call takes them.
            weights: As `mean` takes them. Members with a larger weight have more of a vote.
            members: As `mean` takes them.
            dim: The dim of the classes in a member's answer.
            output: As `mean` takes it.
            **kwargs: As a call takes them, and the other options of `reduce`.

        Returns:
            The classes; (classes, new state) for an entry with states.

        Raises:
            InputError: As `reduce`: members that answer one number for each row have no classes.
            UsageError: As `reduce`.

        Example:
            >>> labels = ens.vote(x)  # [B]
        """
        options = {"weights": weights, "members": members, "dim": dim, "output": output}
        return self._one("vote", args, options | kwargs)

    def _one(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        found = self.reduce(*args, name, **kwargs)
        return (found[0][name], found[1]) if isinstance(found, tuple) else found[name]

    # ---------------------------------------------------------------- programs

    @property
    def plan(self) -> Plan:
        """The plan of pattern `shared` at the smallest batch class.

        Example:
            >>> print(ens.plan.strategies)
        """
        return self.plans()[0]

    @property
    @abstractmethod
    def backend(self) -> str:
        """The backends of pattern `shared`: one name, or several joined by `+` if batch classes differ.

        Example:
            >>> ens.backend
            'eager'
        """

    @abstractmethod
    def plans(self, pattern: str = "shared") -> list[Plan]:
        """Returns the plans of a pattern, one for each batch class.

        Args:
            pattern: `shared` or `each`.

        Returns:
            The plans, the smallest batch class first.

        Raises:
            UsageError: The model was closed.

        Example:
            >>> for plan in ens.plans():
            ...     print(plan.strategies)
        """

    @abstractmethod
    def graph_use(self, pattern: str = "shared") -> list[GraphUse]:
        """Returns which calls run by CUDA graphs, and why others do not: one `GraphUse` for each batch class.

        Args:
            pattern: `shared` or `each`.

        Returns:
            The uses, the smallest batch class first.

        Raises:
            UsageError: The model was closed.

        Example:
            >>> print(ens.graph_use()[0])
        """

    @abstractmethod
    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        """Binds the programs of patterns now instead of at the first call.

        Args:
            patterns: `shared`, `each`, or both.

        Raises:
            UsageError: The model was closed, or no such pattern exists.

        Example:
            >>> ens.warmup(("shared", "each"))
        """

    @abstractmethod
    def probe(self) -> None:
        """Runs the probe of both presets, even if it passed on this machine before.

        Raises:
            ProbeError: An answer is out of bounds.

        Example:
            >>> ens.probe()
        """


class LoadedEntry(ModelCalls):
    """One entry of a loaded model: one method of the members, for all members at once.

    Attributes:
        name: The method's name.
        entry: What the manifest says of the entry.
        members: The members' names.
    """

    name: str
    entry: Entry
    members: tuple[str, ...]
    _manifest: Manifest
    _calibration: Calibration | None = None

    def __len__(self) -> int:
        return len(self.members)

    @property
    def state_dims(self) -> set[str]:
        """The dims of the states that are inputs.

        Example:
            >>> ens.entry("forward").state_dims
            set()
        """
        return self._binder.state_dims

    @property
    def description(self) -> str:
        """The inputs and states with their types.

        Example:
            >>> print(ens.entry("forward").description)
        """
        return self._binder.description

    @property
    @abstractmethod
    def runs_on(self) -> str:
        """Where the programs of pattern `shared` run: `cpu, aot`.

        Example:
            >>> ens.entry("forward").runs_on
            'cpu, eager'
        """

    def reduce(  # documented in `ModelCalls`
        self,
        *args: Any,
        of: str | None = None,
        weights: Sequence[float] | None = None,
        members: Sequence[int | str] | None = None,
        dim: int = -1,
        output: str | int | None = None,
        calibrated: bool = False,
        **kwargs: Any,
    ) -> Any:
        state = kwargs.pop("state", None) if self._binder.states else None

        def request() -> tuple[Reduction, Sequence[Any]]:
            inputs, names = names_apart(args)
            chosen = None if members is None else self._numbers(members)
            reduction = Reduction(names, of, weights, dim, output, chosen)
            if calibrated:
                reduction.calibrate(self.calibration, self.entry.outputs)
            return reduction, inputs

        found = self._reduce(request, kwargs, state)
        if calibrated:
            self._refuse_swapped()  # a member may have been swapped during the call
        return found

    @property
    def calibration(self) -> Calibration:
        """What `calibrated=True` applies: its `kind` and `value`, and what it is of.

        Raises: UsageError if none is recorded for these members, or if one was swapped.

        Example:
            >>> options = {"target": "y", "of": "softmax", "calibrate": True, "save": True}
            >>> report = widepack.evaluate("ens.wide", "val.safetensors", **options)
            >>> print(widepack.load("ens.wide").entry("forward").calibration.value)
        """
        if self._calibration is None:
            self._calibration = calibration_of(self._manifest, self.name, self.members)
        self._refuse_swapped()
        return self._calibration

    def _refuse_swapped(self) -> None:
        """Raises: UsageError if a member was swapped, since the calibration is of the one before."""
        if self.swapped:
            raise UsageError(
                "calibrated=True: a member was swapped in this process, and the calibration was of the one "
                f"before; put the checkpoint into the artifact with widepack.update, and {AGAIN}"
            )

    @property
    @abstractmethod
    def swapped(self) -> bool:
        """Whether a member was replaced in this process by one that answers otherwise.

        Example:
            >>> ens.entry("forward").swapped
            False
        """

    @abstractmethod
    def _reduce(
        self, request: Callable[[], tuple[Reduction, Sequence[Any]]], kwargs: Mapping[str, Any], state: Any
    ) -> Any:
        """Runs a call and reduces its answers. request: returns what is requested, and the other inputs."""

    def _numbers(self, members: Any) -> list[int]:
        """Returns the numbers of the members that an argument names. Raises: UsageError."""
        if isinstance(members, (str, torch.Tensor)) or not isinstance(members, Iterable):
            raise UsageError(
                f"members is {members!r:.60}; reduce takes a list of numbers or names, such as [0, 2]"
            )
        return [number_of(self.members, m) for m in members]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name} of {len(self)} members; {self.description}; {self.runs_on})"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "an entry of a loaded model cannot be copied or pickled; take the model: ens instead of "
            f"ens.entry({self.name!r})"
        )


def names_apart(args: Sequence[Any]) -> tuple[Sequence[Any], list[str]]:
    """Returns the inputs of a call, and the names of figures after them. Raises: UsageError without names."""
    count = len(args)
    while count and isinstance(args[count - 1], str):
        count -= 1
    if count == len(args):
        raise UsageError("reduce needs the names of figures after the inputs, for example reduce(x, 'mean')")
    return args[:count], list(args[count:])

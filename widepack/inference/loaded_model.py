"""Defines what every loaded model can do, wherever its members are: entries, calls, single members."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from widepack_artifacts.errors import some
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest import Member as MemberCheckpoint

from ..errors import UsageError
from ..planning.plan import Plan
from ..spec.entries import FORWARD
from ..spec.names import whole_number
from .graph_pool import GraphUse
from .loaded_entry import LoadedEntry, ModelCalls
from .members.member import Member

if TYPE_CHECKING:
    from .loaded_entry import MemberOfEachRow
    from .members.swap import SwapReport


E = TypeVar("E", bound=LoadedEntry)

_OF_MODULES = ("eval", "train", "to", "cpu", "cuda", "half", "float", "double", "bfloat16", "requires_grad_")
"""What modules of torch have, and a loaded model has not."""


class LoadedModel(ModelCalls, Generic[E]):
    """A loaded artifact: its entries, the calls of `forward`, and single members.

    Args:
        entries: The entries by name, at least one.
    """

    def __init__(self, entries: Mapping[str, E]) -> None:
        self._entries = dict(entries)
        self._default = self._entries.get(FORWARD)

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the entries.

        Example:
            >>> ens.entries
            ('forward',)
        """
        return tuple(self._entries)

    def __repr__(self) -> str:
        names = some(self.members, 4)
        others = ", ".join(n for n in self._entries if n != FORWARD)
        parts = [
            f"{len(self)} members: {names}",
            *([self._default.description] if self._default is not None else []),
            *([f"entries {others}"] if others else []),
            self._first().runs_on,
        ]
        return f"{type(self).__name__}({'; '.join(parts)})"

    # ---------------------------------------------------------------- entries

    def entry(self, name: str) -> E:
        """Returns an entry.

        Args:
            name: The method's name.

        Returns:
            A `WideEntry`, or the entry of a model over several devices or processes.

        Raises:
            UsageError: The artifact has no entry of this name.

        Example:
            >>> y = ens.entry("forward")(x)  # as ens(x)
        """
        if name not in self._entries:
            raise UsageError(f"there is no entry {name!r}; the entries are {', '.join(self._entries)}")
        return self._entries[name]

    def __getattr__(self, name: str) -> E:
        entries: dict[str, E] = self.__dict__.get("_entries", {})
        if name in entries:
            return entries[name]
        habit = "; device and dtype are arguments of widepack.load, and members always answer in eval mode"
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; its entries are {', '.join(entries)}"
            f"{habit if name in _OF_MODULES else ''}"
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._entries]

    def _first(self) -> E:
        """Returns `forward`, or the first entry."""
        return self._default or next(iter(self._entries.values()))

    def _forward(self) -> E:
        """Returns the entry `forward`. Raises: UsageError if the artifact has none."""
        if self._default is None:
            first = next(iter(self._entries))
            raise UsageError(
                f"this model has no entry {FORWARD}; its entries are {', '.join(self._entries)}; "
                f"choose one, for example ens.{first}(...)"
            )
        return self._default

    # ---------------------------------------------------------------- calls, documented in `ModelCalls`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._forward() if self._default is None else self._default)(*args, **kwargs)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward().each(*args, **kwargs)

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
        options: dict[str, Any] = {"of": of, "weights": weights, "members": members, "dim": dim}
        return self._forward().reduce(*args, **options, output=output, calibrated=calibrated, **kwargs)

    def route(self, *args: Any, member: MemberOfEachRow, **kwargs: Any) -> Any:
        return self._forward().route(*args, member=member, **kwargs)

    def only(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self._forward().only(inputs)

    def member(self, member: int | str) -> Member:
        return self._forward().member(member)

    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        """Returns the states of all entries as they begin. The caller carries them from call to call.

        Args:
            **sizes: The size of each dim of the states that are inputs, for example `B=8`.

        Returns:
            `{name: [N, ...]}`: a buffer as each member's checkpoint has it, zeros for an input.

        Raises:
            UsageError: A size is missing or is of no state's dim, or the model was closed.

        Example:
            >>> state = ens.state()
            >>> for x in steps:
            ...     y, state = ens(x, state=state)
        """
        dims = {d for e in self._entries.values() for d in e.state_dims}
        if unknown := sorted(set(sizes) - dims):
            known = f"the dims of states are {', '.join(sorted(dims))}" if dims else "states have no dims"
            raise UsageError(f"no state has the dim {', '.join(unknown)}; {known}")
        return {name: value for e in self._entries.values() for name, value in e.state(**sizes).items()}

    @property
    def backend(self) -> str:
        """What runs the programs: `eager`, `compile`, `aot` or `onnxruntime`.

        Example:
            >>> ens.backend
            'eager'
        """
        return self._first().backend

    def plans(self, pattern: str = "shared") -> list[Plan]:
        return self._forward().plans(pattern)

    def graph_use(self, pattern: str = "shared") -> list[GraphUse]:
        return self._forward().graph_use(pattern)

    def probe(self) -> None:
        """Runs the probe of every entry and both presets, even if it passed on this machine before.

        Raises:
            ProbeError: An answer is out of bounds.

        Example:
            >>> ens.probe()
        """
        for entry in self._entries.values():
            entry.probe()

    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        """Binds the programs of patterns now, for every entry, instead of at the first call.

        Args:
            patterns: `shared`, `each`, or both.

        Raises:
            UsageError: The model was closed, or no such pattern exists.

        Example:
            >>> ens.warmup(("shared", "each"))  # before the first request
        """
        for entry in self._entries.values():
            entry.warmup(patterns)

    # ---------------------------------------------------------------- members

    def __len__(self) -> int:
        return len(self.members)

    @property
    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """The members' names.

        Example:
            >>> ens.members[0]
            'fold0'
        """

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """The manifest of the artifact. A swap does not change it: see `checkpoints`.

        Example:
            >>> ens.manifest.members[0].name
            'fold0'
        """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where inputs are and answers are: the first device of a model on several.

        Example:
            >>> x = x.to(ens.device)
        """

    @property
    @abstractmethod
    def checkpoints(self) -> tuple[MemberCheckpoint, ...]:
        """The checkpoint that each loaded member is now, also after a swap.

        Each has `name` (of the member), `source` (the path as it was given), `sha256` and `bytes` of the
        file.

        Example:
            >>> ens.swap("fold3", "fold3-new.pt")
            >>> ens.checkpoints[3].source
            'fold3-new.pt'
        """

    def __getitem__(self, member: int | str) -> Member:
        """Returns one member, as `member`. A negative number counts from the end. Raises: UsageError."""
        number = whole_number(member)
        if number is not None and -len(self) <= number < 0:
            return self.member(len(self) + number)
        return self.member(member)

    def __iter__(self) -> Iterator[Member]:
        return (self.member(i) for i in range(len(self)))

    @abstractmethod
    def state_dict(self, member: int | str) -> dict[str, Any]:
        """Returns one member's state dict, as `state_dict()` of the module that has loaded its checkpoint.

        It has the versions of the submodules (`_metadata`) and their extra state too, so `load_state_dict` of
        the model takes it as its own.

        Args:
            member: The member's number or name.

        Returns:
            Views of the mapped weights. A swap of this member writes into them.

        Raises:
            UsageError: No loaded member has this number or name, or the model was closed. Or the model
                changes its own state dict when it loads it, or the build ignored extra state: the model would
                load another member.

        Example:
            >>> model = Net()
            >>> model.load_state_dict(ens.state_dict("fold0"))
            <All keys matched successfully>
        """

    @abstractmethod
    def stored_state(self, member: int | str) -> dict[str, Any]:
        """Returns one member's tensors, versions and extra state, as the artifact has them.

        Other than `state_dict`, it does not refuse what `load_state_dict` of the model would change: for
        comparisons with a checkpoint after it was loaded.

        Args:
            member: The member's number or name.

        Returns:
            Views of the mapped weights.

        Raises:
            UsageError: No loaded member has this number or name, or the model was closed.

        Example:
            >>> sorted(ens.stored_state("fold0"))[0]
            'head.bias'
        """

    def swap(
        self,
        member: int | str,
        checkpoint: str | PathLike[str] | Mapping[str, Any],
        *,
        key: str | None = None,
        trust_pickle: bool = False,
        ignore: str | Sequence[str] = (),
        model: str | Callable[..., nn.Module] | None = None,
        model_args: Mapping[str, Any] | None = None,
    ) -> SwapReport:
        """Replaces a member by another checkpoint while other threads call.

        First the checkpoint is compared with the artifact (names, shapes, dtypes, ties) and its answers are
        checked with the probe. All new values of programs are computed. Then new calls wait until calls in
        flight have ended and the member's slices are written. Every answer is wholly of the old member or of
        the new one. From then on programs, `member(i)`, `state_dict(i)` and `state()` have the new weights.
        The artifact does not change.

        Args:
            member: The member's number or name.
            checkpoint: The file or folder of the new weights, or a state dict. A model over several processes
                takes no state dict.
            key: As `build` takes it.
            trust_pickle: As `build` takes it.
            ignore: As `build` takes it. What the build ignored is ignored too.
            model: The factory of one member, as `build` takes it, for a checkpoint that the model changes
                when it loads it (older versions, other names), or that its own code may change.
            model_args: Keyword arguments of the factory.

        Returns:
            A `SwapReport`: what was written, the seconds of each stage, and how long calls waited.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            MemberMismatch: It does not fit, or differs in a weight that all members share.
            VerificationError: Its answers are too far from float64, or a wide program answers wrongly for it.
                Then the old member is restored.
            UsageError: No loaded member has this number or name, a program cannot take another member, or the
                model was closed.

        Example:
            >>> report = ens.swap("fold0", "new.pt")
            >>> report = ens.swap("fold0", models[0].state_dict())
        """
        how = {"key": key, "trust_pickle": trust_pickle, "ignore": ignore}
        return self._swap(member, checkpoint, {**how, "model": model, "model_args": model_args})

    @abstractmethod
    def _swap(
        self, member: int | str, checkpoint: str | PathLike[str] | Mapping[str, Any], how: Mapping[str, Any]
    ) -> SwapReport:
        """Replaces a member. how: the options of `swap`, by name."""

    @abstractmethod
    def close(self) -> None:
        """Releases programs and weights.

        Calls, `member`, `state`, `state_dict` and `swap` raise `UsageError` afterwards. Members and tensors
        that were returned before stay valid. The mapped files stay open as long as one of these exists.
        Freed memory returns to the system.

        Example:
            >>> ens.close()
        """

    def _refuse_copy_of_swapped(self, manifest: Manifest) -> None:
        """Refuses a copy of a model in which members were swapped. Raises: TypeError."""
        if swapped := [c.name for c in self.checkpoints if c not in manifest.members]:
            raise TypeError(
                f"this {type(self).__name__} cannot be copied or pickled: {', '.join(swapped)} was swapped "
                "in this process only, and a copy loads the artifact again; put the checkpoint into the "
                "artifact with widepack.update, and load that"
            )

"""Defines a loaded artifact: N members that run as one, with an entry for each method that was built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest import Member as MemberCheckpoint

from ..errors import UsageError
from ..spec.names import checkpoint_of
from ..system.memory import give_back
from .entry import WideEntry
from .loaded_model import LoadedModel
from .open_artifact import OpenArtifact

if TYPE_CHECKING:
    from ..verification.weight_error import WeightError
    from .cascade import Cascade, CascadeAnswer
    from .members.swap import SwapReport


_IN_MEMORY = "<state dict>"
"""The checkpoint of a member that was swapped by a state dict in memory."""


class WideModel(LoadedModel[WideEntry]):
    """N trained members that run in one call. `widepack.load` returns it.

    Calls may come from several threads at once. A call, `each`, `route`, `reduce`, `mean`, `std`, `vote`,
    `only`, `plans` and `member` are those of the entry `forward`. Other entries are attributes:
    `ens.encode(x)`, or `ens.entry("encode")(x)`.

    Attributes:
        members: The members' names.
        checkpoints: The checkpoint that each member is now.
        entries: The names of the entries.
        manifest: The manifest of the artifact. A swap does not change it.
        device: Where the members run.
        plan: The plan of pattern `shared` at the smallest batch class.
        backend: What runs the programs.

    Example:
        >>> ens = widepack.load("ens.wide")
        >>> y = ens(x)  # all members on one input: x [B, 8], y [N, B, 3]
        >>> z = ens.each(xs)  # each member on its own input: xs [N, B, 8]
        >>> y0 = ens["fold0"](x)  # one member as a plain module
    """

    __module__ = "widepack"  # pickles name the public place

    def __init__(self, artifact: OpenArtifact, again: Callable[..., WideModel]) -> None:
        super().__init__({name: WideEntry(artifact, name) for name in artifact.manifest.entries})
        self._artifact = artifact
        self._again = again
        self._cascades: dict[Any, Cascade] = {}

    @property
    def members(self) -> tuple[str, ...]:
        return self._artifact.members

    @property
    def checkpoints(self) -> tuple[MemberCheckpoint, ...]:
        return self._artifact.checkpoints

    @property
    def manifest(self) -> Manifest:
        return self._artifact.manifest

    @property
    def device(self) -> torch.device:
        return self._artifact.device

    def __reduce__(self) -> tuple[Callable[[], WideModel], tuple[()]]:
        """Copies and pickles by the path: the copy loads the same artifact with the same arguments.

        Raises: TypeError after a swap, which is of this process only; UsageError after `close`.
        """
        self._artifact.check_open()
        self._refuse_copy_of_swapped(self.manifest)
        return self._again, ()

    # ---------------------------------------------------------------- members, documented in `LoadedModel`

    def state_dict(self, member: int | str) -> dict[str, Any]:
        self._artifact.check_open()
        name = self.members[self._artifact.index(member)]
        if refused := self._artifact.manifest.state_dicts.changed_at_load:
            raise UsageError(f"member {name}: {refused}")
        return self.stored_state(member)

    def stored_state(self, member: int | str) -> dict[str, Any]:
        self._artifact.check_open()
        i = self._artifact.chosen[self._artifact.index(member)]
        saved = [w for w in self._artifact.manifest.member_weights if w.role != "constant"]
        tensors = {name: self._artifact.part(w.name, i) for w in saved for name in (w.name, *w.aliases)}
        return self._artifact.manifest.state_dicts.versioned({**tensors, **self._artifact.extra_state(i)})

    def _swap(
        self,
        member: int | str,
        checkpoint: str | PathLike[str] | Mapping[str, Any],
        how: Mapping[str, Any],
        agreed: Callable[[], None] = lambda: None,
    ) -> SwapReport:
        if isinstance(checkpoint, Mapping):
            how, checkpoint = {**how, "state": checkpoint}, _IN_MEMORY
        checkpoint_of(checkpoint)
        from .members.swap import opening, swap  # opens checkpoints, which no other part of a model does

        programs = [e.programs for e in self._entries.values()]
        return swap(self._artifact, programs, member, Path(checkpoint), opening(**how), agreed)

    # ---------------------------------------------------------------- int8 weights

    @property
    def weight_errors(self) -> tuple[WeightError, ...]:
        """What int8 weights change in the answers to the probe's inputs, for each member and output.

        It is measured now, so after a swap it is of the new member. It is of the patterns that are bound:
        `shared`, and `each` after its first call. Without `load(weights="int8")` it is empty.

        Example:
            >>> ens = widepack.load("ens.wide", weights="int8", max_error=0.05)
            >>> print(max(e.largest for e in ens.weight_errors))
        """
        return tuple(row for entry in self._entries.values() for row in entry.weight_errors)

    # ---------------------------------------------------------------- selection

    @property
    def selected_weights(self) -> list[float]:
        """The weight of each member that `widepack select` recorded; 0 for members that it did not select.

        Raises: UsageError if nothing is recorded, or if a member has changed since.

        Example:
            >>> p = ens.mean(x, of="softmax", weights=ens.selected_weights)
        """
        from .cascade import read_record

        if self._artifact.swapped:
            raise UsageError("selected_weights: a member was swapped in this process; select again")
        found = read_record(self.manifest).weights
        return [found.get(name, 0.0) for name in self.members]

    def cascade(
        self,
        *args: Any,
        first: int | None = None,
        until: float | None = None,
        of: str = "softmax",
        dim: int = -1,
        output: str | int | None = None,
        **kwargs: Any,
    ) -> CascadeAnswer:
        """Runs few members on all rows, and more members only on rows of which these are not sure.

        The first stage runs `first` members. A row whose largest mean probability is at least `until` is
        done. The next stages run on the other rows; after each, twice as many members have run as before it.

        Args:
            *args: The inputs as a call takes them.
            first: The number of members of the first stage. Default: what `widepack select` recorded.
            until: The confidence at which a row is done. Default: what `widepack select` recorded, fitted on
                validation data.
            of: What the members answer: `softmax` for scores of classes, `probabilities`. With the recorded
                cascade its own.
            dim: The dim of the classes in a member's answer.
            output: The leaf of an answer with several, as `reduce` takes it.
            **kwargs: The inputs by name.

        Returns:
            A `CascadeAnswer`: the mean probabilities, and how many members ran on each row.

        Raises:
            UsageError: Nothing is recorded and `first` or `until` is missing, the rows are not independent,
                or a member was swapped.
            InputError: The inputs do not match what the model was built for.

        Example:
            >>> found = ens.cascade(x)  # as `widepack select` fitted it
            >>> found = ens.cascade(x, first=3, until=0.9)
            >>> found.mean.argmax(-1), found.calls
        """
        self._artifact.check_open()
        if self._artifact.swapped:
            raise UsageError("cascade: a member was swapped in this process; load the artifact again")
        from .cascade import Cascade, settings_of  # imports the layout of rows, which most calls do not need

        options = first, until, of, dim, output
        with self._artifact.lock:
            if options not in self._cascades:
                name, settings = settings_of(self._artifact, *options)
                entry = self.entry(name) if name else self._forward()
                self._cascades[options] = Cascade(entry, settings, self._of_members)
            cascade = self._cascades[options]
        return cascade.run(args, kwargs)

    def _of_members(self, numbers: list[int]) -> WideModel:
        """Loads some of the members as a model of their own. numbers: their places here."""
        return self._again(members=[self._artifact.chosen[i] for i in numbers])

    def close(self) -> None:
        self._artifact.close()
        self._cascades.clear()
        for entry in self._entries.values():
            entry.forget()
        give_back()


RESERVED = frozenset({n for n in dir(WideModel) if not n.startswith("__")})
"""Names that an entry cannot have: those of the model's attributes."""


def weights_version(model: WideModel) -> int:
    """Returns a number that grows with every replacement of a member, before its weights are written.

    A call of which the number was the same before and after it ran on one version of all members. Calls with
    the same number ran on the same version.
    """
    return model._artifact.replacements  # noqa: SLF001  no name that an entry could have


def swap_together(model: WideModel, member: int, checkpoint: Path, agreed: Callable[[], None]) -> SwapReport:
    """Replaces a member as several processes do it together: in all of them or in none.

    Args:
        model: The model of this process.
        member, checkpoint: As `WideModel.swap` takes them.
        agreed: Waits for the other processes. It is called when nothing but the exchange is left to do, and
            again when the new member's answers are verified. If it raises, the old member stays.

    Returns:
        As `WideModel.swap`.

    Raises:
        WidepackError: As `WideModel.swap`, and what `agreed` raises.
    """
    return model._swap(member, checkpoint, {}, agreed)  # noqa: SLF001  no name that an entry could have

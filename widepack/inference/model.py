"""Defines a loaded artifact: N members that run as one, with an entry for each method that was built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts.manifest import Manifest

from ..errors import UsageError
from ..planning.plan import Plan
from ..spec.entries import FORWARD
from .entry import WideEntry
from .member_access import MemberAccess
from .named_inputs import NamedInputs
from .open_artifact import OpenArtifact
from .reductions import Reductions
from .routes import Routes


class WideModel(MemberAccess, Reductions, Routes, NamedInputs):
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

    def __init__(self, artifact: OpenArtifact, again: Callable[[], WideModel]) -> None:
        super().__init__(artifact)
        self._again = again
        self._default = self._entries.get(FORWARD)

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the entries."""
        return tuple(self._entries)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the artifact. A swap does not change it: see `checkpoints`."""
        return self._artifact.manifest

    @property
    def device(self) -> torch.device:
        """Where the members run."""
        return self._artifact.device

    @property
    def backend(self) -> str:
        """What runs the programs: `eager`, `compile`, `aot` or `onnxruntime`."""
        return self._first().backend

    @property
    def plan(self) -> Plan:
        """The plan of pattern `shared` at the smallest batch class."""
        return self._forward().plan

    def plans(self, pattern: str = "shared") -> list[Plan]:
        """Returns the plans of a pattern, one for each batch class.

        Args:
            pattern: `shared` or `each`.

        Returns:
            The plans, the smallest batch class first.
        """
        return self._forward().plans(pattern)

    def __repr__(self) -> str:
        names = ", ".join(self.members[:4]) + (", ..." if len(self) > 4 else "")
        others = ", ".join(n for n in self._entries if n != FORWARD)
        parts = [
            f"{len(self)} members: {names}",
            *([self._default.description] if self._default is not None else []),
            *([f"entries {others}"] if others else []),
            self._first().programs.description,
        ]
        return f"WideModel({'; '.join(parts)})"

    def __reduce__(self) -> tuple[Callable[[], WideModel], tuple[()]]:
        """Copies and pickles by the path: the copy loads the same artifact with the same arguments.

        Raises: TypeError after a swap, which is of this process only; UsageError after `close`.
        """
        self._artifact.check_open()
        if swapped := [c.name for c in self.checkpoints if c not in self.manifest.members]:
            raise TypeError(
                f"this WideModel cannot be copied or pickled: {', '.join(swapped)} was swapped in this "
                "process only, and a copy loads the artifact again; put the checkpoint into the artifact "
                "with widepack.update, and load that"
            )
        return self._again, ()

    # ---------------------------------------------------------------- entries

    def entry(self, name: str) -> WideEntry:
        """Returns an entry.

        Args:
            name: The method's name.

        Returns:
            A `WideEntry`.

        Raises:
            UsageError: The artifact has no entry of this name.
        """
        if name not in self._entries:
            raise UsageError(f"there is no entry {name!r}; the entries are {', '.join(self._entries)}")
        return self._entries[name]

    def __getattr__(self, name: str) -> WideEntry:
        entries: dict[str, WideEntry] = self.__dict__.get("_entries", {})
        if name in entries:
            return entries[name]
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}; its entries are {', '.join(entries)}"
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._entries]

    def _first(self) -> WideEntry:
        """Returns `forward`, or the first entry."""
        return self._default or next(iter(self._entries.values()))

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members. They share every input that is not marked with `widepack.each`.

        Args:
            *args: The inputs as the member's `forward` takes them. Dtype, device and sizes must match the
                artifact.
            **kwargs: The same by name, and `state` for a model with states: `{name: [N, ...]}`.

        Returns:
            The member's own structure. Every leaf is `[N, *shape]`, where `shape` is that of the member's
            leaf; a list of N tensors if the members' shapes differ. For a model with states: (answer, new
            state).

        Raises:
            InputError: The inputs do not match what the model was built for. Nothing has run then.
            UsageError: The artifact has no entry `forward`, or the model was closed.

        Example:
            >>> y = ens(x)  # x: [B, 8], y: [N, B, 3]
            >>> y, state = ens(x, state=ens.state())  # with states
        """
        return (self._forward() if self._default is None else self._default)(*args, **kwargs)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all members, each on separate inputs: member i gets `[i]` of every input.

        Args:
            *args: For each input of the member a tensor `[N, ...]`, or a list of N tensors of one shape.
            **kwargs: The same by name, and `state` for a model with states.

        Returns:
            As a call returns.

        Raises:
            InputError: The inputs do not match what the model was built for. Nothing has run then.
            UsageError: The artifact has no entry `forward`, or the model was closed.

        Example:
            >>> y = ens.each(xs)  # xs: [N, B, 8], y: [N, B, 3]
        """
        return self._forward().each(*args, **kwargs)

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

    def reduce(self, *args: Any, **kwargs: Any) -> Any:  # documented in `Reductions`
        return self._forward().reduce(*args, **kwargs)

    def route(self, *args: Any, member: Any, **kwargs: Any) -> Any:  # documented in `Routes`
        return self._forward().route(*args, member=member, **kwargs)

    def only(self, inputs: Mapping[str, Any]) -> dict[str, Any]:  # documented in `NamedInputs`
        return self._forward().only(inputs)

    def probe(self) -> None:
        """Runs the probe of every entry and both presets, even if it passed on this machine before.

        Raises:
            ProbeError: An answer is out of bounds.
        """
        for entry in self._entries.values():
            entry.probe()

    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        """Binds the programs of patterns now, for every entry, instead of at the first call.

        Args:
            patterns: `shared`, `each`, or both.
        """
        for entry in self._entries.values():
            entry.warmup(patterns)

    def close(self) -> None:
        """Releases programs and weights.

        Calls, `member`, `state`, `state_dict` and `swap` raise `UsageError` afterwards. Members and tensors
        that were returned before stay valid. The mapped files stay open as long as one of these exists.
        """
        self._artifact.close()
        for entry in self._entries.values():
            entry.forget()


RESERVED = frozenset({n for n in dir(WideModel) if not n.startswith("__")})
"""Names that an entry cannot have: those of the model's attributes."""

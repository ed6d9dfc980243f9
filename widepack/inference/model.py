"""`WideModel`: a loaded artifact: N members that run as one, an entry for each method that was built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from widepack_artifacts.manifest import Manifest

from ..spec.entries import FORWARD
from ..errors import UsageError
from .open_artifact import Held
from .member import Member
from ..spec.names import checkpoint_of
from ..planning.plan import Plan
from .entry import WideEntry

if TYPE_CHECKING:
    from .swap import SwapReport


class WideModel:
    """N members in one. Made by `widepack.load`.

    A call is that of the entry `forward`; `ens.encode(x)` and `ens.entry("encode")(x)` are those of another.

    members: their names. entries: names of the entries. plan: the plan of pattern `shared` at the smallest batch class. backend: what runs. manifest: what the artifact says of
    itself.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._entries = {name: WideEntry(held, name) for name in held.manifest.entries}
        self._own = self._entries.get(FORWARD)

    @property
    def members(self) -> tuple[str, ...]:
        return self._held.members

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def manifest(self) -> Manifest:
        return self._held.manifest

    @property
    def device(self) -> torch.device:
        return self._held.device

    @property
    def backend(self) -> str:
        """What runs: `eager`, `compile`, `aot` or `onnxruntime`."""
        return (self._own or next(iter(self._entries.values()))).backend

    @property
    def plan(self) -> Plan:
        return self._forward().plan

    def plans(self, pattern: str = "shared") -> list[Plan]:
        """The plans of a pattern, one a batch class."""
        return self._forward().plans(pattern)

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        names = ", ".join(self.members[:4]) + (", ..." if len(self) > 4 else "")
        others = ", ".join(n for n in self._entries if n != FORWARD)
        said = [
            f"{len(self)} members: {names}",
            *([self._own._binder.takes_in] if self._own is not None else []),
            *([f"entries {others}"] if others else []),
            (self._own or next(iter(self._entries.values()))).programs.running,
        ]
        return f"WideModel({'; '.join(said)})"

    def entry(self, name: str) -> WideEntry:
        """The entry of this name. Raises: UsageError."""
        if name not in self._entries:
            raise UsageError(f"there is no entry {name!r}; the entries are {', '.join(self._entries)}")
        return self._entries[name]

    def __getattr__(self, name: str) -> WideEntry:
        entries: dict[str, WideEntry] = self.__dict__.get("_entries", {})
        if name in entries:
            return entries[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its entries are {', '.join(entries)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._entries]

    def _forward(self) -> WideEntry:
        if self._own is None:
            first = next(iter(self._entries))
            raise UsageError(
                f"this model has no entry {FORWARD}; its entries are {', '.join(self._entries)}: say which one, for example ens.{first}(...)"
            )
        return self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Every member sees the same inputs, but for those marked with `widepack.each`.

        Inputs: as the member's forward takes them. Returns: the member's structure, every leaf `[N, *the member's shape]` (a list of N where shapes differ).
        A model that carries state takes `state=` and returns (answer, new state).
        Raises: InputError before anything runs.
        """
        return (self._forward() if self._own is None else self._own)(*args, **kwargs)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        """Member i sees `[i]` of every input. Inputs: `[N, ...]`, or lists of N tensors. Returns and raises: as a call."""
        return self._forward().each(*args, **kwargs)

    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        """What the caller carries, as it begins: `{name: [N, ...]}` over all entries; a buffer as each member's checkpoint has it, an input as zeros.

        `y, state = ens(x, state=state)` gives the next. sizes: of the dims that inputs among them have, `ens.state(B=8)`. Raises: UsageError.
        """
        dims = {d for e in self._entries.values() for d in e.state_dims}
        if unknown := sorted(set(sizes) - dims):
            raise UsageError(
                f"no state has the dim {', '.join(unknown)}; {'the dims of states are ' + ', '.join(sorted(dims)) if dims else 'states have no dims'}"
            )
        return {name: value for e in self._entries.values() for name, value in e.state(**sizes).items()}

    def mean(self, *args: Any, of: str | None = "softmax", weights: Sequence[float] | None = None, **kwargs: Any) -> Any:
        """The members' mean answer, `[*the member's shape]`.

        of: `softmax` (over the last dim, the usual mean of classifiers), `sigmoid`, or None for the answers themselves. weights: one a member.
        """
        return self._forward().mean(*args, of=of, weights=weights, **kwargs)

    def std(self, *args: Any, of: str | None = "softmax", **kwargs: Any) -> Any:
        """The members' standard deviation (divided by N), `[*the member's shape]`."""
        return self._forward().std(*args, of=of, **kwargs)

    def vote(self, *args: Any, **kwargs: Any) -> Any:
        """The class that most members choose, ties to the lowest number: argmax over the last dim, then the mode over members."""
        return self._forward().vote(*args, **kwargs)

    def probe(self) -> None:
        """Run the probe of every entry and both presets now, whether or not it passed here before. Raises: VerificationError."""
        for entry in self._entries.values():
            entry.probe()

    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        """Bind the programs of these patterns now, of every entry, instead of at the first call."""
        for entry in self._entries.values():
            entry.warmup(patterns)

    # ---------------------------------------------------------------- members

    def member(self, member: int | str) -> Member:
        """One member, by number or name, as a plain module over the artifact's weights. Raises: UsageError."""
        return self._forward().member(member)

    def __getitem__(self, member: int | str) -> Member:
        """As `member`; a negative number counts from the end, as in every sequence. Raises: UsageError."""
        from_end = isinstance(member, int) and -len(self) <= member < 0
        return self.member(len(self) + member if from_end else member)  # type: ignore[operator]

    def __iter__(self) -> Iterator[Member]:
        return (self.member(i) for i in range(len(self)))

    def state_dict(self, member: int | str) -> dict[str, torch.Tensor]:
        """One member's state dict, every name of its checkpoint, bit for bit; tensors are views of the mapped weights, which a swap writes into. Raises: UsageError."""
        self._held.must_be_open()
        i = self._held.chosen[self._held.index(member)]
        saved = [w for w in self.manifest.weights if w.role != "constant"]
        return {name: self._held.part(w.name, i) for w in saved for name in (w.name, *w.aliases)}

    def swap(self, member: int | str, checkpoint: str | PathLike[str], *, key: str | None = None, trust_pickle: bool = False) -> SwapReport:
        """Put another checkpoint in the place of a member, while other threads call.

        The checkpoint is held to the artifact (names, shapes, dtypes, ties) and its answers to the probe first; whatever programs hold of its weights is made aside; then calls
        in flight are waited for, and new ones held, while its slices are written. Every answer belongs wholly to the old member or to the new one. Programs, `member(i)`,
        `state_dict(i)` and `state()` show the new weights from then on; the artifact stays as it is.

        member: number or name. key, trust_pickle: as `build` takes them. Returns: what was written, the seconds of each stage, and how long calls were held.
        Raises: CheckpointError, MemberMismatch for one that does not fit, or differs in a weight that all members share; VerificationError for answers that cannot be held
        to anything, and for a wide program that answers wrongly for the new member: the old one is back then. UsageError.
        """
        checkpoint_of(checkpoint)
        from .swap import swap  # opens checkpoints, which nothing else of a loaded model does

        return swap(self._held, [e.programs for e in self._entries.values()], member, Path(checkpoint), key, trust_pickle)

    def close(self) -> None:
        """Let go of programs and weights. Calls, `member`, `state`, `state_dict` and `swap` are refused afterwards; members and tensors that were given out stay usable, and
        hold the mapped files open as long as somebody holds them."""
        self._held.close()
        for entry in self._entries.values():
            entry.forget()


RESERVED = frozenset({n for n in dir(WideModel) if not n.startswith("__")} | {"route"})
"""Names that an entry cannot have: the model's own, and those that it will have."""

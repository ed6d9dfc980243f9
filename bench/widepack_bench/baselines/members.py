"""Makes the user's own modules, loads a member's weights into them, and calls them by entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from widepack.errors import WidepackError
from widepack.spec.entries import FORWARD, method_of
from widepack_artifacts.entry import Entry

from ..errors import BenchError
from ..measure.answers import Run, members_of, stack
from ..measure.inputs import Inputs, make
from .derivatives import WithDerivatives

if TYPE_CHECKING:
    from widepack import WideModel


def named_factory(
    name: str, args: Mapping[str, Any], ens: WideModel
) -> Callable[[Mapping[str, Any]], nn.Module]:
    """Returns the factory of this name, as `widepack build --model` takes it. Raises: UsageError."""
    from widepack.checkpoints.named_factory import find_factory

    return find_factory(name, args, [m.source for m in ens.manifest.members])


def own_module(
    factory: Callable[[Mapping[str, Any]], nn.Module], state: Mapping[str, Any], member: str
) -> nn.Module:
    """Makes a user's module with a member's weights, in the dtype of the build.

    Raises: BenchError where its parameters are not the member's.
    """
    module = factory(state).eval()
    expected = {k: v for k, v in module.state_dict().items() if hasattr(v, "shape")}
    missing = sorted(set(expected) - set(state))
    unequal = sorted(k for k in set(expected) & set(state) if expected[k].shape != state[k].shape)
    if missing or unequal:
        what = (
            f"has no {', '.join(missing[:5])}" if missing else f"has other shapes in {', '.join(unequal[:5])}"
        )
        raise BenchError(
            f"member {member}: the artifact {what}, which the model of the factory needs; is it the "
            "model that the artifact was built from?"
        )
    floating = {state[k].dtype for k in expected if state[k].is_floating_point()}
    if len(floating) == 1 and any(
        w.is_floating_point() and w.dtype not in floating for w in expected.values()
    ):
        module = module.to(*floating)  # The build used another dtype than the factory.
    try:
        module.load_state_dict(state)
    except RuntimeError as e:
        raise BenchError(f"member {member}: {' '.join(str(e).split())[:300]}") from e
    return module


class Method(nn.Module):
    """Calls a method of another module as its forward."""

    def __init__(self, member: nn.Module, entry: str) -> None:
        super().__init__()
        self.member = member
        self.entry = entry

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.member, self.entry)(*args, **kwargs)


def called(module: nn.Module, entry: str) -> nn.Module:
    """Returns a module whose forward is that method. Raises: UsageError if there is no such method."""
    if isinstance(module, WithDerivatives):
        return module
    method_of(module, entry)
    return module if entry == FORWARD else Method(module, entry)


def call_inputs(
    entry: Entry | None, inputs: Inputs | None, batch: int, members: int, device: str
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]:
    if inputs is None:
        assert entry is not None  # Inputs are made from a manifest, and only a loaded model has one.
        return make(entry, batch, members=members, device=device)
    args, kwargs = inputs(batch)
    return args, kwargs, {"B": batch}


def reason(error: Exception) -> str:
    """Returns the first useful line of an error, shortened; of widepack's errors without the class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0][:300] if lines else ""
    if isinstance(error, WidepackError) and message:
        return message
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__


def loop(modules: Sequence[nn.Module], each: bool) -> Run:
    """Returns a call that runs the modules one after another and stacks their outputs."""
    if each:
        return lambda *args, **kwargs: stack(
            [m(*members_of(args, i), **members_of(kwargs, i)) for i, m in enumerate(modules)]
        )
    return lambda *args, **kwargs: stack([m(*args, **kwargs) for m in modules])

"""Says whether members of a loaded model were replaced between two calls."""

from __future__ import annotations

from .model import WideModel


def weights_version(model: WideModel) -> int:
    """Returns a number that grows with every replacement of a member, before its weights are written.

    A call of which the number was the same before and after it ran on one version of all members. Calls with
    the same number ran on the same version.
    """
    return model._artifact.replacements  # noqa: SLF001  no name that an entry could have

"""Members that are pickled modules: the checkpoint is its own factory.

Every member is unpickled anew from its own file, so that whatever is no weight (a number in a plain attribute, a buffer that is not saved) is the member's own
too, and a build sees it (comparison (a), alike.py). Only files that were opened with `trust_pickle` have such a module.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from .discovery import Checkpoint
from ..errors import UsageError
from .alignment import Factory


class OwnModules(Factory):
    """The factory of checkpoints that hold their modules."""

    def __init__(self) -> None:
        super().__init__("the pickled modules", _nothing, {})
        self.takes_state_dict = True  # each module has the sizes of its own weights

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """The module in a checkpoint's file, as it was saved, in eval mode."""
        if checkpoint.module is None:
            raise UsageError(f"checkpoint {checkpoint.path} holds no module; name what makes the members: --model package.module:factory")
        module = checkpoint.module().eval()
        return module if self.dtype is None else module.to(self.dtype)


def _nothing() -> nn.Module:
    raise UsageError("pickled modules are read from their own files")

"""Makes members that are pickled modules: each checkpoint contains its module.

Every member is unpickled again from its file. So everything that is not a weight (a number in a plain
attribute, a buffer that is not saved) is the member's own, and a build compares it
(verification/same_program.py). Only files that were opened with `trust_pickle` have a module.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..errors import UsageError
from .discovery import Checkpoint
from .factory import Factory


class PickledModules(Factory):
    """The factory of checkpoints that contain their modules."""

    brings_weights = True

    def __init__(self) -> None:
        super().__init__("the pickled modules", _nothing, {})
        self.takes_state_dict = True  # each module has the sizes of its weights

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """Returns the module in a checkpoint's file, in eval mode. Raises: UsageError."""
        if checkpoint.module is None:
            raise UsageError(
                f"checkpoint {checkpoint.path} contains no module;"
                " name what makes the members: --model package.module:factory"
            )
        module = checkpoint.module().eval()
        return module if self.dtype is None else module.to(self.dtype)


def _nothing() -> nn.Module:
    raise UsageError("pickled modules are read from their own files")

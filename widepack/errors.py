"""widepack's exceptions.

WidepackError                 exit code 1; the root: catch this one
|-- UsageError                2: arguments that cannot be meant: an input spec, an unknown strategy, no checkpoints
|-- CheckpointError           1: a file that is no checkpoint, or one that cannot be read safely
|   `-- MemberMismatch        1: checkpoints that are not of one architecture; all differences in one error
|-- CaptureError              1: a member that torch.export cannot capture, or not without losing a condition
|-- LoweringError             1: an op that no rule, family or fallback can run for all members
|-- VerificationError         1: the wide program, or the capture, does not give the members' own answers
|   `-- ProbeError            1: a loaded program does not give the answers that its artifact recorded; an ArtifactError, too
|-- InputError                1: a call with inputs that the model was not built for
`-- ArtifactError             1: an artifact that is damaged, unknown, or not what it says
    `-- ArtifactExists        2: an output path that is taken
"""

from __future__ import annotations

from widepack_artifacts.errors import ArtifactError as ArtifactError
from widepack_artifacts.errors import WidepackError as WidepackError
from widepack_artifacts.writer import ArtifactExists as ArtifactExists


class UsageError(WidepackError):
    """Arguments that cannot be meant."""

    exit_code = 2


class CheckpointError(WidepackError):
    """A file that is no checkpoint, or one that cannot be read safely."""


class MemberMismatch(CheckpointError):
    """Checkpoints that are not of one architecture, or members that differ in what is no weight."""


class CaptureError(WidepackError):
    """A member that cannot be captured, or not without losing a condition."""


class LoweringError(WidepackError):
    """An op that cannot be run for all members."""


class VerificationError(WidepackError):
    """Answers that are not the members' own."""


class ProbeError(ArtifactError, VerificationError):
    """A loaded program whose answers are not those that its artifact recorded."""


class InputError(WidepackError):
    """A call with inputs that the model was not built for."""

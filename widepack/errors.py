"""Defines widepack's exceptions.

Every error has an exit code, which the command line returns.

WidepackError                 exit code 1; the root: catch this one
|-- UsageError                2: wrong arguments: an input spec, an unknown strategy, no checkpoints
|   `-- Unavailable           2: a backend that cannot run here without compiling or installing something
|-- CheckpointError           1: a file that is not a checkpoint, or cannot be read safely
|   `-- MemberMismatch        1: checkpoints of different architectures; all differences in one error
|-- CaptureError              1: a member that torch.export cannot capture completely
|-- LoweringError             1: an op that cannot run for all members
|-- VerificationError         1: a program whose answers differ from the members'
|   `-- ProbeError            1: a loaded program with other answers than recorded; also an ArtifactError
|-- InputError                1: a call with inputs that the model was not built for
|-- OutsideDomain             2: sizes at which the formulas of a model's costs do not hold
`-- ArtifactError             1: an artifact that is damaged, unknown, or cannot be written
    `-- ArtifactExists        2: an output path that exists
"""

from __future__ import annotations

from widepack_artifacts.costs import OutsideDomain as OutsideDomain
from widepack_artifacts.errors import ArtifactError as ArtifactError
from widepack_artifacts.errors import WidepackError as WidepackError
from widepack_artifacts.folder import ArtifactExists as ArtifactExists


class UsageError(WidepackError):
    """Raised if arguments are wrong or exclude each other. Exit code 2.

    The message names the argument, its value, and the accepted values.

    Example:
        >>> try:
        ...     widepack.build([], "ens.wide")
        ... except widepack.UsageError as e:
        ...     print(e)
        no checkpoints: name the files of the members, for example widepack build ckpts/*.pt -o ens.wide
    """

    __module__ = "widepack"  # pickles name the public place

    exit_code = 2


class Unavailable(UsageError):
    """Raised if a backend cannot run here without compiling or installing something first.

    The message names the backend, what it needs, and how to provide it.

    Example:
        >>> try:
        ...     ens = widepack.load("ens.wide", backend="aot")
        ... except widepack.Unavailable:
        ...     ens = widepack.load("ens.wide")
    """

    __module__ = "widepack"  # pickles name the public place


class CheckpointError(WidepackError):
    """Raised if a file is not a checkpoint, or cannot be read without running code of unknown origin.

    `widepack.build` reports all unreadable checkpoints in one error.

    Example:
        >>> try:
        ...     widepack.build(["notes.txt"], "ens.wide", model="net.py:make", inputs=["x=float32[B,8]"])
        ... except widepack.CheckpointError as e:
        ...     print(e)
    """

    __module__ = "widepack"  # pickles name the public place


class MemberMismatch(CheckpointError):
    """Raised if checkpoints are of different architectures, or if members differ in more than weights.

    The message lists the first differences, by checkpoint and weight, and their number.

    Example:
        >>> try:
        ...     widepack.update("ens.wide", {0: "other_model.pt"})
        ... except widepack.MemberMismatch as e:
        ...     print(e)
    """

    __module__ = "widepack"  # pickles name the public place


class CaptureError(WidepackError):
    """Raised if torch.export cannot capture a member, or only without a condition that its code has.

    The message names the line of the user's code.

    Example:
        >>> try:
        ...     widepack.build(["a.pt"], "ens.wide", model="net.py:make", inputs=["x=float32[B,8]"])
        ... except widepack.CaptureError as e:
        ...     print(e)
    """

    __module__ = "widepack"  # pickles name the public place


class LoweringError(WidepackError):
    """Raised if an op of the member program cannot run for all members.

    Example:
        >>> try:
        ...     widepack.build(["a.pt"], "ens.wide", model="net.py:make", inputs=["x=float32[B,8]"])
        ... except widepack.LoweringError as e:
        ...     print(e)
    """

    __module__ = "widepack"  # pickles name the public place


class VerificationError(WidepackError):
    """Raised if a program's answers differ from the members' by more than the bound.

    The message names the output, the error, its bound, and the first wrong node. Nothing is published.

    Example:
        >>> try:
        ...     widepack.append("ens.wide", ["d.pt"])
        ... except widepack.VerificationError as e:
        ...     print(e)
    """

    __module__ = "widepack"  # pickles name the public place


class ProbeError(ArtifactError, VerificationError):
    """Raised if a loaded program does not give the answers that its artifact recorded.

    Example:
        >>> try:
        ...     ens = widepack.load("ens.wide")
        ... except widepack.VerificationError as e:
        ...     print(e)
    """

    __module__ = "widepack"  # pickles name the public place


class InputError(WidepackError):
    """Raised if a model is called with inputs that it was not built for.

    The message names the input, its type or shape, and what the model takes.

    Example:
        >>> try:
        ...     ens(torch.zeros(4, 9))
        ... except widepack.InputError as e:
        ...     print(e)
    """

    __module__ = "widepack"  # pickles name the public place

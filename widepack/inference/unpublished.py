"""Opens an artifact before it is published, as `load` will open it."""

from __future__ import annotations

import math
import re

import torch

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer

from ..errors import ArtifactError, ProbeError, VerificationError
from ..runtime.admission import guarded
from ..spec.entries import PATTERNS
from ..system.autocast import plain_modes
from .entry import WideEntry
from .load import opening_of
from .open_artifact import BackendOptions, LoadOptions, OpenArtifact

_MEMBER = re.compile(r"of member (\d+)")


def check_opens(writer: Writer, manifest: Manifest) -> None:
    """Opens the files of a writer with the manifest that it will publish, and runs the probe.

    Programs of other devices than the CPU are not run.

    Raises:
        VerificationError: `load` would refuse the artifact. The message names the member's checkpoint.
    """
    sealed = manifest.sealed(writer.files)
    reader = Reader(writer.path, manifest=sealed)
    artifact: OpenArtifact | None = None
    options = LoadOptions(torch.device("cpu"), backend=BackendOptions("eager"), limit=None)
    try:
        with plain_modes(), guarded(str(writer.path)):
            artifact = opening_of(options)(reader)
            for name, entry in sealed.entries.items():
                programs = WideEntry(artifact, name).programs
                for pattern in PATTERNS:
                    if any(w.device == "cpu" and w.pattern == pattern and w.part is None for w in entry.wide):
                        programs.of(pattern)
    except (ProbeError, ArtifactError) as e:
        raise VerificationError(
            f"{writer.path}: load would refuse this artifact: {str(e).splitlines()[0]}\n"
            f"{_checkpoint(sealed, str(e), artifact)}"
            "Nothing was published, and an artifact that was there is unchanged."
        ) from e


def _checkpoint(manifest: Manifest, message: str, artifact: OpenArtifact | None) -> str:
    """Returns a line that names the checkpoint at fault: of the member in the message, or of the first one
    with huge weights. "" if there is none.
    """
    found = _MEMBER.search(message)
    number = int(found[1]) if found else _huge(manifest, artifact)
    if not 0 <= number < len(manifest.members):
        return ""
    member = manifest.members[number]
    return f"Member {member.name} is the checkpoint {member.source}: correct it, or leave it out.\n"


def _huge(manifest: Manifest, artifact: OpenArtifact | None) -> int:
    """Returns the first member with a weight whose square leaves its dtype; -1 if there is none."""
    if artifact is not None:
        for number in range(len(manifest.members)):
            for row in manifest.member_weights:
                weight = artifact.weights.of_member(row.name, number)
                if weight.is_floating_point() and weight.numel():
                    largest = float(weight.abs().max())
                    if not largest <= math.sqrt(torch.finfo(weight.dtype).max):
                        return number
    return -1

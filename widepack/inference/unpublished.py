"""Opens an artifact before it is published, as `load` will open it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

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
    """Returns a line about the member in the message, or about the first one with huge weights.

    It says that a checkpoint is at fault only if its weights are huge. "" if no member is known.
    """
    found, members = _MEMBER.search(message), range(len(manifest.members))
    named = [int(found[1])] if found and int(found[1]) in members else []
    if (place := _huge(manifest, artifact, named or members)) is not None:
        member = manifest.members[place[0]]
        return (
            f"Member {member.name} is the checkpoint {member.source}, and the squares of its weights"
            f" {place[1]} leave their dtype: correct it, or leave it out.\n"
        )
    if not named:
        return ""
    member = manifest.members[named[0]]
    return f"It is the answer of member {member.name}, the checkpoint {member.source}; please report it.\n"


def _huge(
    manifest: Manifest, artifact: OpenArtifact | None, members: Sequence[int]
) -> tuple[int, str] | None:
    """Returns the first of these members with a weight whose square leaves its dtype, and the weight."""
    if artifact is not None:
        for number in members:
            for row in manifest.member_weights:
                weight = artifact.weights.of_member(row.name, number)
                if weight.is_floating_point() and weight.numel():
                    largest = float(weight.abs().max())
                    if not largest <= math.sqrt(torch.finfo(weight.dtype).max):
                        return number, row.name
    return None

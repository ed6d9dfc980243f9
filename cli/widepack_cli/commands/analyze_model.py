"""Derives the costs of a model, or of an artifact that does not have them. It imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from widepack import primitives as primitives  # fills the registry
from widepack.building.costs import model_costs, program_costs, wide_program_costs
from widepack.checkpoints.factory import Factory
from widepack.checkpoints.hugging_face import NAME, hugging_face
from widepack.checkpoints.named_factory import find_factory
from widepack.spec.config import parse_model_args
from widepack_artifacts.costs import Costs
from widepack_artifacts.reader import Reader

from ..shared.failures import Refusal


def of_model(subject: str, given: Sequence[str], inputs: Sequence[str], entry: str, wide: int) -> Costs:
    """Derives the costs of the model that a user names. wide: as in `model_costs`.

    Raises: CaptureError, LoweringError, Refusal, UsageError.
    """
    return model_costs(_factory(subject, given), inputs, entry=entry or "forward", wide=wide)


def of_artifact(reader: Reader, entry: str) -> Costs:
    """Derives the costs of an entry of an artifact from its member program."""
    return program_costs(reader, entry)


def of_wide_artifact(reader: Reader, entry: str, sizes: Mapping[str, int]) -> Costs:
    """Derives the costs of the wide program of an entry of an artifact. sizes: of a call, as in
    `wide_program_costs`.
    """
    return wide_program_costs(reader, entry, sizes)


def _factory(subject: str, given: Sequence[str]) -> Factory:
    """Returns the factory: `package.module:name`, `file.py:name`, `torch.nn.Linear`, or a folder with a
    config.json.
    """
    args = parse_model_args(given)
    path = Path(subject)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if (path / "config.json").is_file():
        return hugging_face({**args, "folder": str(path)}, [])
    if ":" not in subject and "." in subject and not path.exists():
        module, _, name = subject.rpartition(".")
        subject = f"{module}:{name}"
    if subject == NAME:
        raise Refusal(f"{NAME}: name the folder of the model, which has its config.json")
    made = find_factory(subject, args)
    if made.takes_state_dict:
        raise Refusal(
            f"the factory {subject} needs a checkpoint's weights (its argument state_dict), and `analyze` "
            "reads no checkpoint: give a factory without this argument, or build an artifact"
        )
    return made

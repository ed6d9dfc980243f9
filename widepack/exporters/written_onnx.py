"""Describes an ONNX model that was written: its inputs and outputs, and the files that belong to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class WrittenOnnx:
    """The data of an ONNX model that the stages share.

    opset: of the model. inputs, outputs: names and types, as the file has them. initializers: how many
    weights. derived: how many of them the weight prologue computed. input_numbers: for each input of the
    model, its number in the program. booleans: which outputs are boolean. list_lengths: for each output of
    the program, how many outputs the model has; 0 for a single tensor. states: the output with the new value,
    by the input's name. data_files: files of weights beside the model. new_files: those of them that did not
    exist before.
    """

    opset: int
    inputs: list[str]
    outputs: list[str]
    initializers: int
    derived: int
    input_numbers: list[int]
    booleans: list[bool]
    list_lengths: list[int]
    states: dict[str, str]
    data_files: list[Path] = field(default_factory=list)
    new_files: list[Path] = field(default_factory=list)

    def discard(self) -> None:
        """Removes the new files beside a model that is not kept."""
        for path in self.new_files:
            path.unlink(missing_ok=True)

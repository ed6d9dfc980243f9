"""Names the outputs of an entry, for clients of a server and for columns of files."""

from __future__ import annotations

from widepack_artifacts.entry import Entry

ONLY = "output"
"""The name of the only output of a model that gives it no name."""
STATE = "state."
"""What the names of states begin with."""


def output_name(entry: Entry, number: int) -> str:
    """Returns the name of an output.

    It is the key that the model gives it, its number in a tuple, `output` for a single tensor, or
    `state.NAME` for the new value of a state.

    Args:
        entry: The entry.
        number: The number of the output in the manifest.
    """
    for state in entry.state:
        if state.output == number:
            return f"{STATE}{entry.inputs[state.input].name}"
    return entry.outputs[number].name or ONLY

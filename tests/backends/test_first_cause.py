"""The text of an error that other errors were raised from."""

from __future__ import annotations

from widepack.backends.task import first_cause


def test_the_first_error_of_a_chain_is_named() -> None:
    cause = TypeError("\n  No ONNX function found for aten.pad.default\nmore")
    middle = ValueError("the conversion failed")
    middle.__cause__ = cause
    outer = RuntimeError("This is step 3/3 of exporting the model")
    outer.__cause__ = middle
    assert first_cause(outer) == "TypeError: No ONNX function found for aten.pad.default"
    assert first_cause(RuntimeError("alone")) == "RuntimeError: alone"

"""Names the activations of a chain of linear layers."""

from __future__ import annotations

ACTIVATIONS = ("", "relu", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh")
"""The activations by name. "" is none, `gelu_tanh` is `gelu` with `approximate="tanh"`."""

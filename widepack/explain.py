"""Why a member could not be captured, in the user's terms: their own source line, and what to change."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx, nn

_TRANSFORMS = ("functorch tensor", "torch.autograd.grad", "has no attribute 'constant'", "fake tensor in the exported program constant's list")


def explain(error: Exception, module: nn.Module) -> str:
    """Why a member could not be exported, with the user's own line and what to change."""
    text = str(error)
    frame = user_frame(traceback.extract_tb(error.__traceback__))
    where = f" at {frame}" if frame else ""
    name = type(module).__name__
    scripted = [n or name for n, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        return f"{name} holds {', '.join(scripted[:3])} as torch.jit.script made it, which torch.export does not follow: give the member's class as it is before torch.jit.script; its state dict has the same names"
    if any(word in text for word in _TRANSFORMS) or _differentiates(error):
        return f"{name} does what torch.export does not follow{where}: derivatives inside forward (torch.autograd.grad, torch.func.grad, jacrev, jvp), or torch.func over weights. Write the derivative, or the batched product, out in tensor operations; torch says: {text.strip().splitlines()[0][:200]}"
    if "data-dependent" in text or "Could not guard" in text or "Could not extract specialized integer" in text or "_local_scalar_dense" in text:
        return f"{name} branches on the values of a tensor{where}, which no export can follow: {text.splitlines()[0][:300]} Replace the branch by torch.where, or the .item() by tensor arithmetic"
    return f"{name} cannot be exported by torch.export{where}: {type(error).__name__}: {text.strip().splitlines()[0][:400] if text.strip() else ''}"


def _differentiates(error: Exception) -> bool:
    """Whether an export failed inside torch.func or autograd, called by the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("_functorch/eager_transforms" in f.filename or "/autograd/__init__" in f.filename for f in frames)


def is_specialized(error: Exception) -> bool:
    """Whether an export failed because the member's code fixes a dim that was to stay dynamic."""
    text = str(error)
    return "specialized" in text or "Constraints violated" in text


def user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last line of user code in a stack: `net.py:12 in forward: x.item()`."""
    roots = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    own = [f for f in frames if not f.filename.startswith(roots) and "<" not in f.filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else ""


def source_of(n: fx.Node) -> str:
    """The user's own line of a node: `net.py:12, in forward`."""
    return user_line(n.meta.get("stack_trace") or "")


def user_line(trace: str) -> str:
    """The last line in the text of a stack that is not torch's: `net.py:12 in forward`."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', trace)
    root = str(Path(torch.__file__).parent)
    own = [f for f in found if not f[0].startswith(root)] or found
    return f"{Path(own[-1][0]).name}:{own[-1][1]} in {own[-1][2]}" if own else ""

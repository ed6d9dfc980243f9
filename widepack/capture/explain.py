"""Why a member could not be captured, in the user's terms: their own source line, and what to change."""

from __future__ import annotations

import re
import site
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import fx, nn

_TORCH = str(Path(torch.__file__).parent)
_PASSES = tuple(
    f"{root}/{part}/" for root in (_TORCH, "torch") for part in ("fx", "export", "_export", "_functorch", "_subclasses")
)  # which put nodes of their own into a graph
_OWN = str(Path(__file__).parent)
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_LIBRARIES = tuple({*site.getsitepackages(), *sysconfig.get_paths().values()} - {sysconfig.get_path("data"), sysconfig.get_path("scripts")})
_RUNNERS = ("exporting.py", "effects.py", "trial.py")  # what calls the member: the frames before these are not the member's
_TRANSFORMS = ("functorch tensor", "torch.autograd.grad", "has no attribute 'constant'")
_DATA = "fake tensor in the exported program constant's list"

# What a line does that no export can follow -> how that is called, and what to write instead; the first that matches.
_READS = (
    (
        r"validate_args\s*=\s*True",
        "looks at the values of a distribution's arguments",
        "Leave validate_args out: these checks are off while a member is captured, and this line turns them on again",
    ),
    (r"^assert\b|_check\(", "checks the values of a tensor", "Take the check out of the member, and make it before the call"),
    (r"^while\b", "branches on the values of a tensor", "Run a fixed number of steps, each with torch.where(condition, next, now)"),
    (
        r"\brange\(",
        "repeats something as often as the values of a tensor say",
        "Make the number of steps an argument of the factory, or run the largest number of steps and choose with torch.where",
    ),
    (
        r"^(el)?if\b|\bif\b.+\belse\b",
        "branches on the values of a tensor",
        "Compute both sides and choose with torch.where(condition, a, b); a check that only raises belongs before the call",
    ),
    (r"\.tolist\(", "reads the values of a tensor into a Python list", "Keep them a tensor"),
    (
        r"\.item\(|\b(int|float|bool)\(",
        "reads the value of a tensor as a Python number",
        "Keep it a tensor, without .item(), int() and float(), and go on with tensor arithmetic; .item() alone is followed as far as torch.export follows it",
    ),
    ("", "branches on the values of a tensor", "Replace the branch by torch.where, or the .item() by tensor arithmetic"),
)

# What a line does that fixes a size -> what to write instead
_FIXES = (
    (r"\blen\(", "write x.shape[0] for len(x)"),
    (r"\bint\(.*[^/]/[^/]", "write n // 2 for int(n / 2)"),
    (r"\bround\(", "write (n + 1) // 2 for round(n / 2), which rounds a half up"),
    (
        r"\bmath\.(log|exp|sin|cos|tan|pow)\w*\(",
        "write x.new_full((), n).log() for math.log(n), a tensor; math.sqrt(n) and n ** 0.5 are followed as they are",
    ),
    (r"\blinspace\(.*dtype", "write torch.linspace(a, b, n).to(dtype): in float32 and float64 the number of steps stays dynamic"),
    (r"\b(int|float)\(", "leave int() and float() around sizes out"),
    (r"\bunbind\(|\bfor\b.+\bin\b|\blist\(", "work on the whole tensor instead of a Python list of its parts"),
    (r"\.tolist\(", "keep the values a tensor"),
    (r"^assert\b", "leave the assert out"),
)

# An op of an export that has no form in a program -> what the member does, and what to write instead
_OPS = (
    (
        r"_pack_padded_sequence",
        "packs sequences by their lengths",
        "Run the padded sequences, and read each at its own length with gather or torch.where",
    ),
    (r"normal_functional|rand|bernoulli|multinomial", "draws random numbers", "Draw them outside, and make them an input"),
    (
        r"^(?:builtins|math)\.(\w+)$",
        "reckons with a size by {0}()",
        "Write it in whole numbers: n // 2 for int(n / 2), -(-n // 3) for math.ceil(n / 3), (n + 1) // 2 for round(n / 2)",
    ),
    (
        r"higher_order\.(cond|while_loop|map|scan)",
        "uses torch's {0}, control flow that has no form in an artifact",
        "Compute both sides and choose with torch.where, or run a fixed number of steps",
    ),
)


def explain(error: Exception, module: nn.Module, letters: Mapping[str, str] = MappingProxyType({})) -> str:
    """Why a member could not be exported, with the user's own line and what to change. letters: torch's name of a size (`s27`) -> what the inputs call it."""
    text = str(error)
    frame = user_frame(traceback.extract_tb(error.__traceback__))
    where = f" at {frame}" if frame else ""
    name = type(module).__name__
    if _DATA in text:
        return f"{name} does what torch.export does not follow{where}: derivatives inside forward (torch.autograd.grad, torch.func.grad, jacrev, jvp), or writing into a parameter or buffer by .data. Write the derivative out in tensor operations; write into parameters under torch.no_grad() without .data; torch says: {text.strip().splitlines()[0][:200]}"
    if any(word in text for word in _TRANSFORMS) or _differentiates(error):
        return f"{name} does what torch.export does not follow{where}: derivatives inside forward (torch.autograd.grad, torch.func.grad, jacrev, jvp), or torch.func over weights. Write the derivative, or the batched product, out in tensor operations; torch says: {text.strip().splitlines()[0][:200]}"
    if "data-dependent" in text or "Could not guard" in text or "Could not extract specialized integer" in text or "_local_scalar_dense" in text:
        what, instead = reads(frame)
        return f"{name} {what}{where}, which no export can follow. {instead}"
    if ".numpy() is not supported" in text:
        return f"{name} leaves torch for NumPy{where}, where no export can follow. Write it with torch's own functions"
    if "__format__" in text:
        return f"{name} writes the value of a tensor into a text{where}, which no export can follow. Leave it out of the member"
    scripted = [n or "the member" for n, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        return f"{name} holds {', '.join(scripted[:5])}, compiled by torch.jit{where}, which no export can follow. Make the members of plain modules, without torch.jit"
    if isinstance(error, RecursionError):
        return f"{name} cannot be exported by torch.export{where}: something is nested without end. Look for a list or dict of the member that contains itself, or for a function that calls itself as deep as Python allows"
    return f"{name} cannot be exported by torch.export{where}: {type(error).__name__}: {first_line(text, letters)}"


def first_line(text: str, letters: Mapping[str, str] = MappingProxyType({})) -> str:
    """What torch says, at most a line of it, with the inputs' names for sizes."""
    line = text.strip().splitlines()[0][:400] if text.strip() else ""
    return re.sub(r"\bs\d+\b", lambda found: letters.get(found[0], found[0]), line)


def reads(frame: str) -> tuple[str, str]:
    """What a line of user code does with the values of a tensor, and what to write instead."""
    code = code_of(frame)
    return next((what, instead) for pattern, what, instead in _READS if re.search(pattern, code))


def way_out(frame: str) -> str:
    """What to change in a line that fixes a size, ``: ...``; empty where the line does not tell."""
    code = code_of(frame)
    return next((f": {instead}" for pattern, instead in _FIXES if re.search(pattern, code)), "")


def no_form(op: str, name: str, module: nn.Module, frame: str) -> str:
    """Why an op of an export is in no program: what the member does there. op: its name in a program; name: the node's."""
    where = f" at {frame}" if frame else ""
    if op == "aten._local_scalar_dense.default":
        what, instead = reads(frame)
        return f"{type(module).__name__} {what}{where}, which no program can follow. {instead}"
    for pattern, what, instead in _OPS:
        if found := re.search(pattern, op):
            return f"{type(module).__name__} {what.format(*found.groups())}{where}, node {name}, {op}. {instead}"
    return f"node {name} is {op}, {f'from {frame}, ' if frame else ''}an op that widepack does not know; please report it"


def _differentiates(error: Exception) -> bool:
    """Whether an export failed inside torch.func or autograd, called by the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("_functorch/eager_transforms" in f.filename or "/autograd/__init__" in f.filename for f in frames)


def is_specialized(error: Exception) -> bool:
    """Whether an export failed because the member's code fixes a dim that was to stay dynamic."""
    text = str(error)
    return "specialized" in text or "Constraints violated" in text


def has_no_derivative(error: Exception) -> bool:
    """Whether an export failed because torch would keep derivatives that it does not have; a plain call under no_grad asks for none."""
    return "is not differentiable with respect to argument" in str(error)


def code_of(frame: str) -> str:
    """The code in `net.py:12 in forward: x.item()`."""
    return frame.rpartition(_BY)[2].partition(": ")[2].strip()


_BY = ", by way of "


def user_frame(frames: Iterable[traceback.FrameSummary]) -> str:
    """The member's line in a stack: `net.py:12 in forward: x.item()`.

    Where the innermost line is an installed library's, and the user's own code calls that, both, the user's first.
    """
    rows = list(frames)
    start = max((i + 1 for i, f in enumerate(rows) if f.filename.startswith(_OWN) and Path(f.filename).name in _RUNNERS), default=0)
    own = [f for f in rows[start:] if not f.filename.startswith((_TORCH, _OWN)) and "<" not in f.filename and not _is_pythons(f.filename)]
    if not own:
        return ""
    users = [f for f in own if not f.filename.startswith(_LIBRARIES)]
    last = _said(own[-1])
    return last if not users or users[-1] is own[-1] else f"{_said(users[-1])}{_BY}{last}"


def _is_pythons(file: str) -> bool:
    """Whether a file is of Python's own library (contextlib, copy), in whose folder installed packages lie too."""
    return file.startswith(_STDLIB) and "-packages" not in file


def _said(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}{f': {frame.line}' if frame.line else ''}"


def source_of(n: fx.Node, *, code: bool = False) -> str:
    """The user's own line of a node: `net.py:12 in forward`. Of a node that torch made by itself, that of what it reads, or of what reads it."""
    for step in (lambda m: m.all_input_nodes, lambda m: list(m.users)):
        waiting, met = [n], {n}
        while waiting:
            node = waiting.pop(0)
            if line := user_line(node.meta.get("stack_trace") or "", code=code):
                return line
            new = [m for m in step(node) if m not in met]
            met.update(new)
            waiting += new
    return ""


def user_line(trace: str, *, code: bool = False) -> str:
    """The last line in the text of a stack that is not torch's, nor widepack's: `net.py:12 in forward`; with its code where that is asked for and there is any."""
    found: Sequence[tuple[str, str, str, str]] = re.findall(r'File "([^"]+)", line (\d+), in (\S+)(?:\n +(.+))?', trace)
    found = [f for f in found if not f[0].startswith(f"{_OWN}/")]  # what a member is wrapped in to be exported
    own = [f for f in found if not f[0].startswith((_TORCH, "torch/"))] or [f for f in found if not f[0].startswith(_PASSES)]
    own = [f for f in own if "<" not in f[0]] or own
    if not own:
        return ""
    file, number, name, text = own[-1]
    return f"{Path(file).name}:{number} in {name}" + (f": {text.strip()}" if code and text else "")

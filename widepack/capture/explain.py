"""Explains why a member could not be captured: the user's source line, what it does, and what to write
instead.

Tables of patterns (`_READS`, `_FIXES`, `_OPS`) map a line of user code, or an op, to these words.
"""

from __future__ import annotations

import itertools
import re
import site
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import fx, nn

from widepack_artifacts.errors import some

from .derivatives import UnseenResult, takes_derivatives
from .exported import reached

_TORCH = f"{Path(torch.__file__).parent}/"  # not torchvision
_PARTS = ("fx", "export", "_export", "_functorch", "_subclasses")
_PASSES = tuple(f"{root}/{part}/" for root in (_TORCH[:-1], "torch") for part in _PARTS)
"""Parts of torch that add nodes to a graph."""
_WIDEPACK = str(Path(__file__).parents[1])
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_LIBRARIES = tuple(
    {*site.getsitepackages(), *sysconfig.get_paths().values()}
    - {sysconfig.get_path("data"), sysconfig.get_path("scripts")}
)
# These files of widepack call the member. Frames up to theirs do not belong to the member.
_RUNNERS = ("export.py", "effects.py", "trial.py")
_DATA_DEPENDENT = (
    "data-dependent",
    "Could not guard",
    "Could not extract specialized integer",
    "_local_scalar_dense",
)
ITEM = "aten._local_scalar_dense.default"
"""The op that reads a number of a tensor."""
ASSERTS = {
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range",
    "sym_constrain_range_for_size",
}  # fmt: skip
"""The ops, without library and overload, that only check a value."""
_TORCH_CHARS = 400  # of torch's own message

_NUMBER = (
    "reads the value of a tensor as a Python number",
    "Keep it in a tensor, without .item(), int() and float(), and compute with tensors; "
    "torch.export follows only some uses of .item()",
)

# pattern of a line that torch.export cannot follow -> what the line does, what to write instead; the first
# match counts
_READS = (
    (
        r"validate_args\s*=\s*True",
        "looks at the values of a distribution's arguments",
        "Remove validate_args: widepack turns these checks off during capture, and this line turns them on",
    ),
    (
        r"^assert\b|_check\(",
        "checks the values of a tensor",
        "Remove the check from the member, and make it before the call",
    ),
    (
        r"^while\b",
        "branches on the values of a tensor",
        "Run a fixed number of steps, each with torch.where(condition, next, now)",
    ),
    (
        r"\brange\(|^for\b",
        "repeats something a number of times that depends on the values of a tensor",
        "Make the number of steps an argument of the factory, or run the largest number of steps and choose "
        "with torch.where",
    ),
    (
        r"^(el)?if\b|\bif\b.+\belse\b",
        "branches on the values of a tensor",
        "Compute both sides and choose with torch.where(condition, a, b); make a check that only raises an "
        "error before the call",
    ),
    (r"\.tolist\(", "reads the values of a tensor into a Python list", "Keep them in a tensor"),
    (r"\.item\(|\b(int|float|bool)\(", *_NUMBER),
    (
        "",
        "reads the values of a tensor",
        "Keep the values in tensors: torch.where for a branch, tensor arithmetic for .item()",
    ),
)

# pattern of a line that fixes a size -> what to write instead
_FIXES = (
    (r"\blen\(", "write x.shape[0] for len(x)"),
    (r"\bint\(.*[^/]/[^/]", "write n // 2 for int(n / 2)"),
    (r"\bround\(", "write (n + 1) // 2 for round(n / 2), which rounds a half up"),
    (
        r"\bmath\.(log|exp|sin|cos|tan|pow)\w*\(",
        "write x.new_full((), n).log() for math.log(n), a tensor; math.sqrt(n) and n ** 0.5 may stay as they "
        "are",
    ),
    (
        r"\blinspace\(.*dtype",
        "write torch.linspace(a, b, n).to(dtype): in float32 and float64 the number of steps stays dynamic",
    ),
    (r"\b(int|float)\(", "remove int() and float() around sizes"),
    (
        r"\bunbind\(|\bfor\b.+\bin\b|\blist\(",
        "work on the whole tensor instead of a Python list of its parts",
    ),
    (r"\.tolist\(", "keep the values in a tensor"),
    (r"^assert\b", "remove the assert"),
)

_FLEX = (
    "uses FlexAttention, whose functions of scores and masks have no form in an artifact",
    "Use torch.nn.functional.scaled_dot_product_attention: attn_mask takes a boolean mask in place of a "
    "block mask, and a float mask for the numbers that a score_mod adds",
)

_SPARSE = re.compile(r"\baten\._?(?:to_)?sparse(?:\b|_)|\bSparse\w*(?:TensorImpl|CPU|CUDA|Meta)\b")

# pattern of an op that no program may have -> what the member does, what to write instead
_OPS = (
    (r"higher_order\.flex_attention", *_FLEX),
    (
        r"_pack_padded_sequence",
        "packs sequences by their lengths",
        "Run the padded sequences, and read each at its own length with gather or torch.where",
    ),
    (
        r"normal_functional|rand|bernoulli|multinomial|poisson|binomial|dirichlet|gamma",
        "draws random numbers",
        "Draw them outside, and make them an input",
    ),
    (
        r"^(?:builtins|math)\.(\w+)$",
        "computes with a size, or with a number that it reads from a tensor, by {0}()",
        "For sizes, use whole numbers: n // 2 for int(n / 2), -(-n // 3) for math.ceil(n / 3), (n + "
        "1) // 2 for "
        "round(n / 2). Keep a value of a tensor in a tensor: x.trunc() for int(x.item())",
    ),
    (
        r"higher_order\.(cond|while_loop|map|scan)",
        "uses torch's {0}, control flow that has no form in an artifact",
        "Compute both sides and choose with torch.where, or run a fixed number of steps",
    ),
    (
        r"^aten\.(\w+?)_backward\.",
        "takes a derivative through {0}, which has no form in an artifact",
        "Write that op as products and index operations, or take the derivative outside of the member",
    ),
)


def explain(error: Exception, module: nn.Module, letters: Mapping[str, str] = MappingProxyType({})) -> str:
    """Explains why torch.export failed on a member, in one paragraph with the user's line and what to change.

    letters: torch's name of a size (`s27`) -> what the inputs call it.
    """
    text = str(error)
    frame = user_frame(traceback.extract_tb(error.__traceback__))
    line = error.line if isinstance(error, UnseenResult) else frame
    at = f" at {line}" if line else ""
    name = type(module).__name__
    torch_says = f"torch says: {text.strip().splitlines()[0][:200] if text.strip() else type(error).__name__}"
    if takes_derivatives(error):
        return (
            f"{name} cannot be exported by torch.export{at}: it takes derivatives in a way that torch cannot "
            "follow (such as torch.vmap of torch.func.grad), uses torch.func over weights, or writes into a "
            "parameter or buffer by .data. Use torch.autograd.grad of a sum over the batch, or write it in "
            f"tensor operations; {torch_says}"
        )
    if is_of_data(error):
        what, instead = reads(frame)
        return f"{name} {what}{at}, which torch.export cannot capture. {instead}"
    if ".numpy() is not supported" in text:
        return f"{name} uses NumPy{at}, which torch.export cannot capture. Write it with torch's functions"
    if "__format__" in text:
        return (
            f"{name} writes the value of a tensor into a string{at}, which torch.export cannot "
            "capture. Remove it from the member"
        )
    if match := re.search(r"Found <class '([^']+)'> in output, which is not a known type", text):
        return (
            f"{name} returns a {match[1].rpartition('.')[2]}{at}, which has no form in an artifact. "
            "Outputs are "
            "tensors, numbers, strings and None, in tuples, lists, dicts, named tuples, dataclasses and "
            "distributions of torch: return its tensors in one of these"
        )
    if words := control_flow(error, module, at):
        return words
    if _SPARSE.search(text) or ("UnsupportedOperator" in type(error).__name__ and "sparse" in frame):
        return (
            f"{name} computes with a sparse tensor{at}, which torch.export cannot capture. Keep it dense "
            "(to_dense(), and a @ x for torch.sparse.mm(a, x)), or sum the rows with x.index_add"
        )
    if text.startswith("FlexAttention "):
        return f"{name} {_FLEX[0]}{at}. {_FLEX[1]}"
    return _nested_or_scripted(error, module, at) or (
        f"{name} cannot be exported by torch.export{at}: {type(error).__name__}: {first_line(text, letters)}"
    )


def control_flow(error: Exception, module: nn.Module, at: str) -> str:
    """The message for control flow of torch (`torch.cond`) whose body torch did not compile; else "".

    torch compiles a body also in a plain call. That fails while widepack watches what the member reads.
    """
    match = re.search(r"Higher Order Operator: [\w.]*?(\w+)$", str(error), re.MULTILINE)
    if type(error).__name__ != "UncapturedHigherOrderOpError" or match is None:
        return ""
    what, instead = next((w, i) for pattern, w, i in _OPS if "cond" in pattern)
    return f"{type(module).__name__} {what.format(match[1])}{at}. {instead}"


def _nested_or_scripted(error: Exception, module: nn.Module, at: str) -> str:
    """The message for a member that torch.jit compiled or that is nested without end; empty for others."""
    if words := scripted(module, at):
        return words
    name = type(module).__name__
    if isinstance(error, RecursionError):
        return (
            f"{name} cannot be exported by torch.export{at}: an object is nested in itself. Look for "
            "a list or dict of the member that contains itself, or for a function that calls itself "
            "without end"
        )
    return ""


def scripted(module: nn.Module, at: str = "") -> str:
    """The message for a member with parts that torch.jit compiled; empty for others."""
    parts = [n or "the member" for n, m in module.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if not parts:
        return ""
    return (
        f"{type(module).__name__} contains {some(parts)}, compiled by torch.jit{at}, which "
        "torch.export cannot capture. Use plain modules, without torch.jit"
    )


def first_line(text: str, letters: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the first line of torch's message, with the inputs' names for sizes."""
    line = text.strip().splitlines()[0][:_TORCH_CHARS] if text.strip() else ""
    return re.sub(r"\bs\d+\b", lambda match: letters.get(match[0], match[0]), line)


def reads(frame: str) -> tuple[str, str]:
    """Returns what a line of user code does with the values of a tensor, and what to write instead."""
    code = code_of(frame)
    return next((what, instead) for pattern, what, instead in _READS if re.search(pattern, code))


def way_out(frame: str) -> str:
    """Returns what to change in a line that fixes a size, as `: ...`; empty where no pattern matches."""
    code = code_of(frame)
    return next((f": {instead}" for pattern, instead in _FIXES if re.search(pattern, code)), "")


def is_of_value(n: fx.Node) -> bool:
    """Whether a node computes with a number that was read from a tensor, not with sizes alone."""

    def inputs(node: fx.Node) -> list[fx.Node]:
        # what a tensor was computed from does not matter
        tensor = isinstance(node.meta.get("val"), torch.Tensor) and node is not n
        return [] if tensor else node.all_input_nodes

    return any(str(node.target) in (ITEM, "aten.item.default") for node in reached(n, inputs))


def no_form(op: str, name: str, module: nn.Module, frame: str, of_value: bool = False) -> str:
    """Explains why a member program cannot have an op of an export, in one paragraph.

    op: the op's name in a program. name: the name of the node. frame: the user's line. of_value: whether the
    op computes with a number that was read from a tensor.
    """
    at = f" at {frame}" if frame else ""
    if of_value:
        what, instead = _NUMBER
        node = f"node {name}, {op}"
        return f"{type(module).__name__} {what}{at} ({node}), which a program cannot contain. {instead}"
    if op == ITEM:
        what, instead = reads(frame)
        return f"{type(module).__name__} {what}{at}, which a program cannot contain. {instead}"
    for pattern, what, instead in _OPS:
        if match := re.search(pattern, op):
            return (
                f"{type(module).__name__} {what.format(*match.groups())}{at} (node {name}, {op}). {instead}"
            )
    return (
        f"node {name} is {op}, {f'from {frame}, ' if frame else ''}an op that widepack does not know; "
        "please report it"
    )


def is_of_data(error: Exception) -> bool:
    """Whether an export failed because the member's code reads a value as a number, or branches on it."""
    of_op = type(error).__name__ == "DataDependentOutputException"  # of `torch.equal`
    return of_op or any(word in str(error) for word in _DATA_DEPENDENT)


def is_specialized(error: Exception) -> bool:
    """Whether an export failed because the member's code fixes a dim that should stay dynamic."""
    text = str(error)
    return "specialized" in text or "Constraints violated" in text


def has_no_derivative(error: Exception) -> bool:
    """Whether an export failed because torch has no derivative of an op. A call under no_grad needs none."""
    return "is not differentiable with respect to argument" in str(error)


def code_of(frame: str) -> str:
    """Returns the code of a frame: `x.item()` of `net.py:12 in forward: x.item()`."""
    return frame.rpartition(_BY)[2].partition(": ")[2].strip()


_BY = ", by way of "  # between the user's line and the line of a library that it calls


def user_frame(frames: Iterable[traceback.FrameSummary]) -> str:
    """Returns the member's line in a stack: `net.py:12 in forward: x.item()`.

    If the innermost line belongs to an installed library that the user's own code calls, both lines are
    returned, the user's first.
    """
    rows = list(frames)
    runners = [f.filename.startswith(_WIDEPACK) and Path(f.filename).name in _RUNNERS for f in rows]
    start = max((i + 1 for i, runs in enumerate(runners) if runs), default=0)
    members = [f for f in rows[start:] if not is_infrastructure(f.filename)]
    if not members:
        return ""
    users = [f for f in members if not f.filename.startswith(_LIBRARIES)]
    last = _frame_text(members[-1])
    return last if not users or users[-1] is members[-1] else f"{_frame_text(users[-1])}{_BY}{last}"


def is_infrastructure(file: str) -> bool:
    """Whether a frame's file belongs to torch, to widepack or to Python, or is no file."""
    # installed packages may lie in the folder of the standard library
    of_python = file.startswith(_STDLIB) and "-packages" not in file
    return file.startswith((_TORCH, _WIDEPACK)) or "<" in file or of_python


def _frame_text(frame: traceback.FrameSummary) -> str:
    code = f": {frame.line}" if frame.line else ""
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}{code}"


def source_of(n: fx.Node, *, code: bool = False) -> str:
    """Returns the user's line of a node: `net.py:12 in forward`.

    A node that torch made has none. Then the line of a node that it reads counts, else of a node that reads
    it.
    """
    nodes = itertools.chain(reached(n, lambda m: m.all_input_nodes), reached(n, lambda m: m.users))
    lines = (user_line(node.meta.get("stack_trace") or "", code=code) for node in nodes)
    return next(filter(None, lines), "")


def user_line(trace: str, *, code: bool = False) -> str:
    """Returns the last line in the text of a stack that belongs neither to torch nor to widepack.

    The form is `net.py:12 in forward`; with code=True the line's code follows after a colon, where it is
    known.
    """
    rows: Sequence[tuple[str, str, str, str]] = re.findall(
        r'File "([^"]+)", line (\d+), in (\S+)(?:\n +(.+))?', trace
    )
    rows = [r for r in rows if not r[0].startswith(f"{_WIDEPACK}/")]
    members = [r for r in rows if not r[0].startswith((_TORCH, "torch/"))]
    members = members or [r for r in rows if not r[0].startswith(_PASSES)]
    members = [r for r in members if "<" not in r[0]] or members
    if not members:
        return ""
    file, number, name, text = members[-1]
    return f"{Path(file).name}:{number} in {name}" + (f": {text.strip()}" if code and text else "")

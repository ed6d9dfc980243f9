"""Finds the differences between checkpoints, or between checkpoints and the model, and describes them."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from widepack_artifacts.errors import some

from ..ir.torch_internals import memory_id
from .checkpoint import Checkpoint, is_floating
from .model_names import prefixes_of
from .model_names import under_model_names as under_model_names
from .state_dict import TensorInfo, bytes_of, info_of, is_extra_state, pattern_of

_SHOWN = 4  # differences in a message
_PIECE_BYTES = 16 << 20
Infos = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Compared:
    """The checkpoints that are compared, under the model's names.

    infos: the dtypes and shapes of each checkpoint's weights. labels: how messages name each checkpoint.
    model: the dtypes and shapes of the model's weights; None: the first checkpoint is the model. canonical:
    for a tied weight its name in the files. aliases: for such a name the others. ragged: whether shapes may
    differ.
    """

    checkpoints: Sequence[Checkpoint]
    infos: Sequence[Infos]
    labels: Sequence[str]
    model: Infos | None
    canonical: Mapping[str, str]
    aliases: Mapping[str, tuple[str, ...]]
    ragged: bool

    @classmethod
    def of(
        cls,
        checkpoints: Sequence[Checkpoint],
        labels: Sequence[str],
        model_state: Mapping[str, Tensor] | None,
        ragged: bool,
    ) -> Compared:
        """Compares checkpoints with one another, and with the state dict of a model unless it is None."""
        infos = [c.tensors() for c in checkpoints]
        model = None if model_state is None else {n: info_of(t) for n, t in model_state.items()}
        canonical, aliases = tied_names(model_state or {}, infos)
        return cls(checkpoints, infos, labels, model, canonical, aliases, ragged)


@dataclass
class Differences:
    """A line for each difference, and hints on what to do. A hint that applies twice is stored once."""

    lines: list[str] = field(default_factory=list)
    hints: dict[str, None] = field(default_factory=dict)

    def hint(self, text: str) -> None:
        """Adds a hint."""
        self.hints[text] = None

    def describe(self) -> str:
        """Returns the first lines, the number of the others, and all hints as one text."""
        head = self.lines[0]
        if len(self.lines) > 1:
            numbered = some((f"({i}) {line}" for i, line in enumerate(self.lines, 1)), _SHOWN, "; ")
            head = f"the members do not match, {len(self.lines)} differences: {numbered}"
        return " ".join([f"{head}.", *self.hints])


def differences(compared: Compared) -> Differences:
    """Returns all differences.

    Weights that differ only in a floating dtype are one line for all checkpoints.
    """
    result = Differences()
    other_dtypes = False
    for i in range(len(compared.infos)):
        _compare_names(compared, i, result)
        other_dtypes |= _compare_weights(compared, i, result)
        _compare_tied(compared, i, result)
    if other_dtypes:
        _describe_dtypes(compared, result)
    return result


def mismatch(checkpoint: Checkpoint, model_state: Mapping[str, Tensor], ragged: bool, about: str = "") -> str:
    """Returns why a checkpoint does not fit a model, without its name; "" if it fits.

    about: only hints with this text are added.
    """
    checkpoint = under_model_names(checkpoint, model_state)
    result = differences(Compared.of([checkpoint], [""], model_state, ragged))
    if not result.lines:
        return ""
    text = "; ".join(line.removeprefix(":").strip() for line in result.lines)
    return " ".join([f"{text}.", *(h for h in result.hints if about in h)])


def key_hints(checkpoint: Checkpoint, model_state: Mapping[str, Tensor]) -> str:
    """Returns hints on keys for a checkpoint that a model does not take; "" if there are none."""
    result = differences(Compared.of([checkpoint], [""], model_state, ragged=True))
    return " ".join(hint for hint in result.hints if "--key" in hint)


def _compare_names(compared: Compared, i: int, result: Differences) -> None:
    """Adds the weights that checkpoint i lacks or has in excess."""
    info, label, canonical, model = compared.infos[i], compared.labels[i], compared.canonical, compared.model
    expected, owner = (compared.infos[0], compared.labels[0]) if model is None else (model, "the model")
    missing = sorted(n for n in expected if n not in info and canonical.get(n, n) not in info)
    # numbers and texts that the file has beside the weights
    beside = [n for n in compared.checkpoints[i].names if n not in info and not is_extra_state(n)]
    unexpected = sorted(n for n in (*info, *beside) if n not in expected)
    if missing:
        result.lines.append(f"{label} lacks {some(missing, 20)}, which {owner} has".strip())
    if unexpected:
        result.lines.append(f"{label} has {some(unexpected, 20)}, which {owner} does not have".strip())
    if missing or unexpected:
        maker = "." if model is None else ", the one that --model with its arguments makes."
        result.hint(f"Members are of one architecture{maker}")
    if model is None:
        return
    prefixes = prefixes_of(compared.checkpoints[i], model) if missing else []
    if len(prefixes) > 1:
        keys = [prefix.rstrip(".") for prefix in prefixes]
        pattern = pattern_of(keys)
        several = f", or take a member of each: --key {pattern!r}" if pattern else ""
        example = f"--key {keys[0]}{several}"
        result.hint(
            f"All of the model's names are in it under {some(keys, 6)}: name one, for example {example}."
        )
    if unexpected and not missing:
        result.hint(
            f"What is not the model's can be left out by a pattern: {_patterns(unexpected, expected)}."
        )
    if unexpected and not missing and (copies := _copies(unexpected, expected)):
        result.hint(f"Weights of the model's names are in it under {copies} too: --key {copies} takes those.")


def _compare_weights(compared: Compared, i: int, result: Differences) -> bool:
    """Adds the weights of checkpoint i whose dtype or shape differs.

    Returns: whether weights differ only in their floating dtype. No line is added for these.
    """
    info, model, ragged = compared.infos[i], compared.model, compared.ragged
    expected = compared.infos[0] if model is None else model
    other_dtypes = False
    for name in sorted(n for n in info if n in expected):
        have = info[name]
        sides = [(compared.labels[0], compared.infos[0].get(name))] if i else []
        if model is not None:
            sides.append(("the model", model[name]))
        others = [(side, it) for side, it in sides if it is not None and _conflict(have, it, ragged)]
        if others and all(_differs_in_float_dtype(have, other, ragged) for _, other in others):
            other_dtypes = True
        elif others:
            sizes = ", ".join(f"{side} has {other}" for side, other in others)
            result.lines.append(f"{compared.labels[i]}: {name} is {have}; {sizes}")
            for _, other in others:
                result.hint(_hint(have, other))
    if model is not None and (count := _stacked(info, model)):
        result.hint(f"It is a stack of {count} members of the model's shapes: --key '[*]' takes each.")
    return other_dtypes


def _stacked(info: Infos, model: Infos) -> int:
    """Returns the number of members in a stack of all weights; 0 if it is none."""
    sizes = {
        info[name].shape[0] if name in info and info[name].shape[1:] == one.shape and info[name].shape else 0
        for name, one in model.items()
    }
    return sizes.pop() if len(sizes) == 1 else 0


def _compare_tied(compared: Compared, i: int, result: Differences) -> None:
    """Adds names of checkpoint i that are one tensor in the model but differ in the file."""
    info, checkpoint = compared.infos[i], compared.checkpoints[i]
    for name, first in compared.canonical.items():
        if name == first or name not in info or info[name] != info[first]:
            continue
        if not bit_equal(checkpoint.get(name), checkpoint.get(first)):
            label = compared.labels[i]
            result.lines.append(f"{label}: {name} and {first} differ, but are one tensor in the model")
            result.hint(
                "If both were trained, give a model that does not tie them (--model hf: --model-arg "
                "tie_word_embeddings=false); if one is left over, save the file without it."
            )


def _describe_dtypes(compared: Compared, result: Differences) -> None:
    """Adds the line for floating weights whose dtypes differ between checkpoints, or from the model's."""
    model = compared.model
    by_dtypes: dict[str, list[str]] = {} if model is None else {_dtypes(model): ["the model"]}
    for name, info in zip(compared.labels, compared.infos):
        by_dtypes.setdefault(_dtypes(info), []).append(name or "it")
    groups = "; ".join(f"{dtypes} in {some(names, 20)}" for dtypes, names in by_dtypes.items())
    result.lines.append(f"the floating weights have other dtypes: {groups}")
    dtype = _floating(compared.infos[0]).most_common(1)[0][0]
    result.hint(
        f"Give --dtype {dtype} (or another): it converts every floating weight once, and the model to it."
    )


def _differs_in_float_dtype(have: TensorInfo, other: TensorInfo, ragged: bool) -> bool:
    """Returns whether two weights differ only in their floating dtype."""
    floats = is_floating(have.dtype) and is_floating(other.dtype)
    return floats and not _conflict(have, other._replace(dtype=have.dtype), ragged)


def _floating(info: Infos) -> Counter[str]:
    """Counts the floating weights of each dtype."""
    return Counter(one.dtype for one in info.values() if is_floating(one.dtype))


def _dtypes(info: Infos) -> str:
    """Returns `float32`, or `bfloat16 (12 weights), float32 (2 weights)`."""
    counts = _floating(info).most_common()
    return ", ".join(
        dtype if len(counts) == 1 else f"{dtype} ({count} weight{'s' if count > 1 else ''})"
        for dtype, count in counts
    )


def _conflict(have: TensorInfo, other: TensorInfo, ragged: bool) -> bool:
    """Returns whether two weights cannot be members' values of one weight."""
    same_shape = len(have.shape) == len(other.shape) if ragged else have.shape == other.shape
    return have.dtype != other.dtype or not same_shape


def _hint(have: TensorInfo, other: TensorInfo) -> str:
    """Returns what to do about two weights that conflict."""
    if have.dtype != other.dtype:
        return "One weight has one dtype in all members and in the model; convert the checkpoints."
    if len(have.shape) != len(other.shape):
        return "Shapes of other ranks are another architecture."
    return (
        "Heads of other sizes need a factory with a parameter `state_dict=` that sizes the module by the"
        " weights."
    )


def tied_names(
    model: Mapping[str, Tensor], infos: Sequence[Infos]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Returns the weights with several names: `{name: canonical name}` and `{canonical name: other names}`.

    safetensors stores a tied weight once, so the canonical name is the first that all checkpoints have.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in model.items():
        if tensor.numel():
            groups.setdefault(place_of(tensor), []).append(name)
    canonical, aliases = {}, {}
    for names in groups.values():
        first = next((n for n in names if all(n in info for info in infos)), None)
        if len(names) > 1 and first is not None:
            canonical.update(dict.fromkeys(names, first))
            aliases[first] = tuple(n for n in names if n != first)
    return canonical, aliases


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Returns a key that is equal for two names of one tensor, also on the meta device."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    return memory_id(tensor), tensor.storage_offset(), shape, stride, tensor.dtype


def _patterns(unexpected: Sequence[str], model: Mapping[str, object]) -> str:
    """Returns the options that ignore names which the model does not have: `--ignore 'criterion.*'`."""
    tops = {name.partition(".")[0] for name in model}
    patterns = dict.fromkeys(
        f"{top}.*" if rest and top not in tops else name
        for name in unexpected
        for top, _, rest in [name.partition(".")]
    )
    options = [f"--ignore {shlex.quote(pattern)}" for pattern in patterns]
    return " ".join(options[:3]) + (" ..." if len(options) > 3 else "")


def _copies(names: Sequence[str], model: Mapping[str, object]) -> str:
    """Returns the prefix under which the names contain all of the model's again (an average beside the
    weights).
    """
    first = max(model, key=len, default="")
    prefixes = [name[: -len(first) - 1] for name in names if name.endswith(f".{first}")]
    return next((prefix for prefix in prefixes if all(f"{prefix}.{name}" in names for name in model)), "")


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bits.

    Reading stops at the first difference.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    step = max(1, _PIECE_BYTES // a.element_size())
    # Trained members differ in the small first piece, so the rest is not read from disk.
    starts = [0, *range(1024, a.numel(), step)]
    ends = [*starts[1:], a.numel()]
    return all(torch.equal(bytes_of(a[s:e]), bytes_of(b[s:e])) for s, e in zip(starts, ends))

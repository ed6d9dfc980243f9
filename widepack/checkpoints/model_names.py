"""Finds the names that a model has for the weights of a checkpoint.

Wrappers leave parts in names: `module.` (DataParallel), `_orig_mod.` (torch.compile), `model.` (Lightning). A
part is removed or added only if the model's own names show that this is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .checkpoint import Checkpoint

_INNER = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def under_model_names(checkpoint: Checkpoint, model: Mapping[str, object]) -> Checkpoint:
    """Returns a checkpoint under the names that the model has.

    A prefix that was removed from its names is restored if the model itself is wrapped and has it. If the
    checkpoint has none of the model's names, but all of them under one prefix (`model.` in a checkpoint of
    Lightning), that part is taken. The other weights are not the model's. If the model has one prefix before
    all of these names (`net.`, of a module that wraps the trained one), the prefix is added. Parts of
    wrappers inside names (`backbone.module.0.weight`) are left out where more names are then the model's.
    """
    named = _under(checkpoint, model)
    if all(name in named.names for name in model):
        return named
    bare = _bare(model)
    plain = _bare(checkpoint.unstripped().names)
    if len(bare) < len(model) or len(plain) < len(checkpoint.names):
        return named  # two names become one
    whole = checkpoint.unstripped()
    inner = _under(whole.renamed({name: whole.names[stored] for name, stored in plain.items()}), bare)
    again = inner.renamed({bare.get(name, name): stored for name, stored in inner.names.items()})
    return again if known_names(again, model) > known_names(named, model) else named


def _bare(names: Iterable[str]) -> dict[str, str]:
    """Returns names without the parts of wrappers: `{bare name: name}`."""
    return {_INNER.sub("", name): name for name in names}


def known_names(checkpoint: Checkpoint, model: Mapping[str, object]) -> int:
    """Returns how many of a model's names a checkpoint has."""
    return sum(name in model for name in checkpoint.names)


def prefix_of(checkpoint: Checkpoint, model: Mapping[str, object]) -> str:
    """Returns the one prefix under which a checkpoint has the most of a model's names; "" for none.

    It is for a model that loads other names than its own: a checkpoint may lack some.
    """
    names = checkpoint.names
    if any(name in names for name in model):
        return ""
    counts: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for i in range(1, len(parts)):
            if ".".join(parts[i:]) in model:
                prefix = ".".join(parts[:i]) + "."
                counts[prefix] = counts.get(prefix, 0) + 1
    most = max(counts.values(), default=0)
    best = [prefix for prefix, count in counts.items() if count == most]
    return best[0] if len(best) == 1 else ""


def _under(checkpoint: Checkpoint, model: Mapping[str, object]) -> Checkpoint:
    """Applies the rules of `under_model_names` for the beginning of names."""
    whole = checkpoint.unstripped()
    if known_names(whole, model) > known_names(checkpoint, model):
        return whole
    prefixes = prefixes_of(checkpoint, model)
    if len(prefixes) == 1:
        return checkpoint.under(prefixes[0])
    if wrapped := _wrapped(checkpoint, model):
        return wrapped
    return checkpoint


def _wrapped(checkpoint: Checkpoint, model: Mapping[str, object]) -> Checkpoint | None:
    """Returns the checkpoint under the names of a model that wraps the trained one; None if it does not.

    All names of the model have one prefix, and the checkpoint has none of them, but all names without it.
    """
    names = checkpoint.names
    first = next(iter(model), "")
    if "." not in first or any(name in names for name in model):
        return None
    parts = first.split(".")
    for i in range(1, len(parts)):
        prefix = ".".join(parts[:i]) + "."
        if not all(name.startswith(prefix) for name in model):
            return None
        bare = {name.removeprefix(prefix): name for name in model}
        inner = checkpoint
        if not any(name in names for name in bare):
            prefixes = prefixes_of(checkpoint, bare)
            if len(prefixes) != 1:
                continue
            inner = checkpoint.under(prefixes[0])
        stored = inner.names
        if all(name in stored for name in bare):
            return inner.renamed({bare.get(n, n): s for n, s in stored.items()})
    return None


def prefixes_of(checkpoint: Checkpoint, model: Mapping[str, object]) -> list[str]:
    """Returns the prefixes under which a checkpoint has all of the model's names, if it has none without."""
    names = checkpoint.names
    if not model or any(name in names for name in model):
        return []
    first = max(model, key=len)
    prefixes = dict.fromkeys(name[: -len(first)] for name in names if name.endswith(f".{first}"))
    return [prefix for prefix in prefixes if all(prefix + name in names for name in model)]

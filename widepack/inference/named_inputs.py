"""Defines how a loaded model, and each of its entries and members, selects inputs by name: `only`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .binder import Binder


class NamedInputs:
    """Selects the inputs of a call by name."""

    _binder: Binder

    def only(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of a dict's inputs that the model uses.

        A call refuses an input that it does not use, since a name may be misspelled. A tokenizer's dict often
        has such inputs (`token_type_ids`, `offset_mapping`). `only` drops them where the caller says so. It
        is a method, not an option of a call: an option could have the name of an input, and a method serves
        all forms of call alike. Values are neither copied nor checked.

        An input is dropped if the model has none of this name, or if the artifact was built without it and
        its value is a tensor: the default, for example `token_type_ids=None`, is part of the program then, so
        the answer is the member's own without that input. In an input that is a dict, unused keys are dropped
        too.

        Args:
            inputs: The inputs by name: a dict, or another mapping, for example a `BatchEncoding` of
                transformers. Values are as a call takes them.

        Returns:
            A new dict, in the order of `inputs`.

        Raises:
            InputError: `inputs` is not a mapping.

        Example:
            >>> batch = tokenizer(texts, return_tensors="pt", padding=True)
            >>> y = ens(**ens.only(batch))
            >>> y = ens.route(**ens.only(batch), member=ids)
        """
        return self._binder.only(inputs)

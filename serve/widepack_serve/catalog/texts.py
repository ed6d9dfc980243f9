"""Makes the inputs of a model of texts, with a tokenizer that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from widepack.errors import Unavailable, UsageError

from ..errors import RequestError, TooLarge
from .layout import EntryLayout, WireTensor

TEXT = "text"
"""The input that has the texts, one for each row."""
IDS, MASK = "input_ids", "attention_mask"


class TextInput:
    """A tokenizer for the models of an artifact.

    Texts are neither shortened nor changed. Those of one request are padded to the longest of them, or to the
    length that the model was built for.

    Args:
        folder: Where the tokenizer is, as `save_pretrained` of transformers writes it. Nothing is downloaded
            and no code of the folder runs.

    Raises:
        UsageError: There is no tokenizer in the folder.
        Unavailable: transformers is not installed.
    """

    def __init__(self, folder: str) -> None:
        if find_spec("transformers") is None:
            raise Unavailable("--tokenizer needs transformers: pip install 'widepack[serve,hf]'")
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():
            raise UsageError(f"--tokenizer {folder} is not a folder; name one that save_pretrained wrote")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            self._rows(["a"])  # sets its options: several threads may read them, and none may change them
        except Exception as e:  # noqa: BLE001  tokenizers raises errors of no other class
            text = " ".join(str(e).split())[:200]
            raise UsageError(f"--tokenizer {folder} has no tokenizer that can be read: {text}") from None

    def reads(self, layout: EntryLayout) -> bool:
        """Returns whether an entry takes tokens, and no input of the name `text` itself."""
        names = {i.name for i in layout.inputs}
        return IDS in names and TEXT not in names

    def tokens(self, layout: EntryLayout, texts: Sequence[str], most: int) -> dict[str, torch.Tensor]:
        """Returns the inputs of an entry that the tokenizer makes, one row for each text.

        Args:
            layout: The entry.
            texts: The texts.
            most: The most numbers of an input.

        Raises:
            RequestError: The tokenizer or the model cannot take texts of these lengths.
            TooLarge: The inputs would have too many numbers.
        """
        described = {i.name: i for i in layout.inputs}
        if not texts:
            raise RequestError("input text has no texts; give one for each row")
        found = self._rows(texts)
        lengths = [len(row) for row in found[IDS]]
        length = self._length(described[IDS], max(lengths))
        if len(texts) * length > most:
            raise TooLarge(
                f"the texts have {len(texts)} rows of up to {max(lengths)} tokens, and the limit of a "
                f"request is {most} numbers (--max-values); send them in several requests"
            )
        if min(lengths) < length:
            self._check_padding(described, lengths, length)
        made = {n: self._padded(n, rows, length) for n, rows in found.items() if n in described}
        return {n: torch.tensor(rows, dtype=described[n].datatype.dtype) for n, rows in made.items()}

    def _rows(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        """Returns the tokens of each text, and what else the tokenizer makes of it."""
        options = {"padding": False, "truncation": False, "return_attention_mask": True}
        return dict(self._tokenizer(list(texts), **options))

    def _padded(self, name: str, rows: Sequence[list[int]], length: int) -> list[list[int]]:
        """Returns rows of one length."""
        of = {IDS: self._tokenizer.pad_token_id, "token_type_ids": self._tokenizer.pad_token_type_id}
        pads = [[of.get(name, 0)] * (length - len(row)) for row in rows]
        left = self._tokenizer.padding_side == "left"
        return [pad + row if left else row + pad for row, pad in zip(rows, pads)]

    def _length(self, ids: WireTensor, longest: int) -> int:
        """Returns how many tokens a row has. Raises: RequestError if a text has more than the model takes."""
        fixed = ids.sizes[-1]
        if fixed < 0:
            return longest
        if longest > fixed:
            raise RequestError(
                f"input text: a text has {longest} tokens, and the model was built for {fixed}; send shorter "
                "ones"
            )
        return fixed

    def _check_padding(self, described: Any, lengths: Sequence[int], length: int) -> None:
        """Checks that padding changes no answer. Raises: RequestError."""
        if MASK not in described:
            raise RequestError(
                f"input text: texts of {min(lengths)} to {max(lengths)} tokens would be padded to {length}, "
                f"but the model has no input {MASK}, so that padding would count as text; send texts of one "
                f"length, or build with {MASK}"
            )
        if self._tokenizer.pad_token_id is None:
            raise RequestError(
                "input text: the texts have different lengths, and the tokenizer has no token for padding; "
                "send texts of one length"
            )

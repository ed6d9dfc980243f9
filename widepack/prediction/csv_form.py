"""Says how a CSV file is written: its first line, what separates its values, its decimal point."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, UsageError

_TAB = ("tab", "\\t")
_OTHERS = (";", "\t", "|")
_NUMBER = re.compile(r"[+-]?([0-9]+[.,]?[0-9]*|[.,][0-9]+)([eE][+-]?[0-9]+)?")
_VALUES = ("", "nan", "na", "n/a", "null", "none", "inf", "-inf", "true", "false")
_HEAD = 2**16  # bytes that are looked at
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class CsvForm:
    """How a CSV file is written.

    Attributes:
        header: Whether the first line has the names of the columns. None: it does, and is refused if a name
            is a number.
        delimiter: What stands between values; None for a comma.
        decimal: What stands before the decimals of a number.
    """

    header: bool | None = None
    delimiter: str | None = None
    decimal: str = "."

    @classmethod
    def of(cls, path: Path, header: Any, delimiter: Any, decimal: Any) -> CsvForm:
        """Checks the options of a user. Raises: UsageError."""
        if header is not None and type(header) is not bool:
            raise UsageError(f"header={header!r:.40} is neither True nor False")
        if isinstance(delimiter, str) and delimiter.lower() in _TAB:
            delimiter = "\t"
        if delimiter is not None and not (
            isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
            and delimiter not in '"\r\n\0' and not delimiter.isalnum()
        ):  # fmt: skip  # what a delimiter is not, in one line
            raise UsageError(
                f"delimiter={delimiter!r:.40} is no delimiter; give one character, such as ';', or 'tab'"
            )
        if decimal not in (".", ","):
            raise UsageError(f"decimal={decimal!r:.40} is unknown; give '.' or ','")
        form = cls(header, delimiter, decimal)
        if form != cls() and path.suffix.lower() != ".csv":
            raise UsageError(f"{path}: header=, delimiter= and decimal= are for .csv files; leave them out")
        return form

    @property
    def separator(self) -> str:
        """What stands between values."""
        return self.delimiter or ","

    def check_head(self, path: Path) -> None:
        """Looks at the first bytes of a file. Raises: InputError if they are no text in UTF-8; UsageError if
        the first line has another separator.
        """
        with open(path, "rb") as file:
            head = file.read(_HEAD)
        if head.startswith(_UTF_16) or b"\0" in head:
            what = (
                "is text in UTF-16" if head.startswith(_UTF_16) else "has NUL bytes, and is no text in UTF-8"
            )
            raise InputError(f"{path} {what}; save it as CSV in UTF-8")
        lines = [line.strip("\r") for line in head.decode("utf-8-sig", "replace").split("\n")]
        first = next((line for line in lines if line), "")
        if first.lower().startswith("sep=") and len(first) == 5:
            raise InputError(
                f"{path}: the first line is {first!r}, which is for Excel alone; remove it, and give the "
                "separator with delimiter= (--delimiter)"
            )
        if self.separator in first or self.delimiter is not None:
            return
        if other := next((s for s in _OTHERS if s in first), None):
            shown, word = ("tabs", "tab") if other == "\t" else (repr(other), other)
            raise UsageError(
                f"{path}: the first line has no {self.separator!r}, but {shown}: {first[:60]!r}. If this is "
                f"what stands between its values, give delimiter={word!r} (--delimiter '{word}'). If the "
                f"file has one column of this name, give delimiter={self.separator!r} (--delimiter "
                f"'{self.separator}')"
            )

    def names(self, path: Path, found: Sequence[str]) -> list[str]:
        """Returns the names of the columns, without spaces around them.

        Args:
            path: The file, for messages.
            found: The values of the first line; made-up names for a file without a header.

        Raises:
            InputError: Two columns have one name, or two have none.
            UsageError: A name is a number, so that the line may be a row.
        """
        names = [name.strip() for name in found]
        if self.header is None and (why := _like_a_row(names)):
            raise UsageError(
                f"{path}: the first line may be a row, since {why}.\n"
                "If the file has no names, give header=False (--no-header): its columns are f0, f1, ...\n"
                "If these are the names of the columns, give header=True (--header)"
            )
        for k, name in enumerate(names):
            if name in names[:k]:
                first = names.index(name)
                both = f"the columns {first} and {k} (the first one is 0)"
                raise InputError(
                    f"{path}: {both} have {f'the name {name}' if name else 'no name'}; give each column a "
                    "name of its own in the first line, or header=False (--no-header) if it is a row"
                )
        return names


def _like_a_row(names: Sequence[str]) -> str:
    """Returns why the first line may be a row; "" if it has names."""
    if number := next((n for n in names if _NUMBER.fullmatch(n)), None):
        return f"{number} is a number"
    if names and all(n.lower() in _VALUES for n in names):
        return "it has no name: " + ", ".join(n or "(nothing)" for n in names[:4])
    return ""

"""Unpacks the body of a request: gzip and deflate within a limit, and the JSON part before binary tensors."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

from ..errors import RequestError, TooLarge, UnknownEncoding
from .growing import Body, Growing
from .work import NoSteps, Work

ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The content encodings, and their windows for zlib."""
LEVEL = 1
"""The compression of answers: the fastest."""
MOST_RATIO = 200
"""The most bytes of an unpacked body for each packed byte. Texts of different numbers have up to 10."""
_FREE = 1 << 20
"""Up to this size an unpacked body may have any ratio."""
_PIECE, _STEP = 1 << 16, 1 << 20
"""How many bytes are given to zlib at a time, and how many it returns."""
_NO_STEPS = NoSteps()
_REFUSED = re.compile(r"q=0(\.0*)?")
"""The quality of an encoding that a client does not accept."""


def _ignored(_: int) -> None:
    pass


def unpacked(
    body: Body,
    encoding: str,
    most: int,
    work: Work = _NO_STEPS,
    grown: Callable[[int], None] = _ignored,
) -> Body:
    """Returns a body without its encoding.

    Args:
        body: As it came.
        encoding: The header Content-Encoding; "" or `identity` for none.
        most: The most bytes that it may have once unpacked.
        work: Is told of each step.
        grown: Is called with the number of bytes of each piece that was unpacked.

    Raises:
        UnknownEncoding: The encoding is not gzip or deflate.
        RequestError: The body is damaged.
        TooLarge: It has more bytes than `most`, or than `MOST_RATIO` for each of its packed bytes.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in ENCODINGS:
        raise UnknownEncoding(f"content-encoding {encoding[:40]!r} is unknown; known: {', '.join(ENCODINGS)}")
    reader = zlib.decompressobj(ENCODINGS[name])
    found = Growing()
    view = memoryview(body)
    limit = min(most, max(_FREE, MOST_RATIO * len(body)))
    step = min(_STEP, limit + 1)
    try:
        for start in range(0, len(body), _PIECE):
            rest: bytes | memoryview = view[start : start + _PIECE]
            while True:
                piece = reader.decompress(rest, step)
                if found.size + len(piece) > limit:
                    raise _too_large(len(body), limit, most)
                grown(len(piece))
                found.append(piece)
                work.step()
                rest = reader.unconsumed_tail
                if reader.eof or (not rest and len(piece) < step):
                    break
            if reader.eof:
                more = len(reader.unused_data) + max(len(body) - start - _PIECE, 0)
                if more:
                    raise RequestError(f"the body has {more} bytes after its {name} data")
                return found.whole()
    except zlib.error as e:
        raise RequestError(f"the body is not {name}: {e}") from None
    raise RequestError(f"the body ends before its {name} data is complete")


def _too_large(size: int, limit: int, most: int) -> TooLarge:
    if limit == most:
        return TooLarge(f"the body has more than {most} bytes once unpacked; the limit is --max-body")
    return TooLarge(
        f"the body of {size} bytes has more than {limit} bytes once unpacked, over {MOST_RATIO} for each; "
        "send it without the encoding"
    )


def packed(body: Body, accepted: str) -> tuple[Body, str]:
    """Returns an answer in an encoding that the client accepts, and the encoding's name; "" for none.

    accepted: the header Accept-Encoding.
    """
    for part in accepted.lower().split(","):
        name, _, quality = part.replace(" ", "").partition(";")
        if name in ENCODINGS and not _REFUSED.fullmatch(quality):
            writer = zlib.compressobj(LEVEL, zlib.DEFLATED, ENCODINGS[name])
            return writer.compress(body) + writer.flush(), name
    return body, ""


def header_length(text: str | None, size: int) -> int:
    """Returns how many bytes of a body are JSON.

    Args:
        text: The header Inference-Header-Content-Length; None without it.
        size: The bytes of the body.

    Raises:
        RequestError: The header is not a number of bytes of this body.
    """
    if text is None:
        return size
    if not (text.isascii() and text.isdigit() and len(text) < 16) or int(text) > size:
        raise RequestError(
            f"Inference-Header-Content-Length is {text[:20]!r}; it is the number of bytes of the JSON "
            f"part, and the body has {size}"
        )
    return int(text)

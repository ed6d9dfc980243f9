"""Unpacks the body of a request: gzip and deflate within a limit, and the JSON part before binary tensors."""

from __future__ import annotations

import re
import zlib

from ..errors import RequestError, TooLarge, UnknownEncoding

ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The content encodings, and their windows for zlib."""
LEVEL = 1
"""The compression of answers: the fastest."""
_REFUSED = re.compile(r"q=0(\.0*)?")
"""The quality of an encoding that a client does not accept."""


def unpacked(body: bytes | bytearray, encoding: str, most: int) -> bytes | bytearray:
    """Returns a body without its encoding.

    Args:
        body: As it came.
        encoding: The header Content-Encoding; "" or `identity` for none.
        most: The most bytes that it may have once unpacked.

    Raises:
        UnknownEncoding: The encoding is not gzip or deflate.
        RequestError: The body is damaged.
        TooLarge: It has more bytes than `most`.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in ENCODINGS:
        raise UnknownEncoding(f"content-encoding {encoding[:40]!r} is unknown; known: {', '.join(ENCODINGS)}")
    reader = zlib.decompressobj(ENCODINGS[name])
    try:
        found = reader.decompress(body, most + 1)
    except zlib.error as e:
        raise RequestError(f"the body is not {name}: {e}") from None
    if len(found) > most:
        raise TooLarge(f"the body has more than {most} bytes once unpacked; the limit is --max-body")
    if not reader.eof:
        raise RequestError(f"the body ends before its {name} data is complete")
    if reader.unused_data:
        raise RequestError(f"the body has {len(reader.unused_data)} bytes after its {name} data")
    return found


def packed(body: bytes, accepted: str) -> tuple[bytes, str]:
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

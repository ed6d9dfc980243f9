"""Finds out how a message is packed.

gRPC would unpack each message as soon as it has arrived, and many at a time. The server has it off, and
unpacks messages itself, as it does bodies. gRPC does not say then how a message is packed.
"""

from __future__ import annotations


def encoding_of(data: bytes) -> str:
    """Returns the encoding of a message; "" for none.

    A message of this protocol begins with a field from 1 to 7. gzip begins as a field of an unknown type
    would, and deflate as field 15 would.
    """
    if data.startswith(b"\x1f\x8b"):
        return "gzip"
    if data.startswith(b"\x78") and len(data) > 1 and not int.from_bytes(data[:2], "big") % 31:
        return "deflate"
    return ""

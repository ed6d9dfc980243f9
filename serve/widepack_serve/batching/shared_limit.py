"""Divides a limit among clients: one client can fill it, but cannot keep the others out."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable


class SharedLimit:
    """Amounts that clients hold together, such as rows that wait or bytes of bodies.

    As long as all amounts together are within the limit, a client may hold as much as it likes. Beyond that,
    a client may still hold its share: the limit divided by the number of clients that hold something. So k
    clients hold at most `1 + 1/2 + ... + 1/k` times the limit.

    Args:
        most: The limit.

    Attributes:
        most: As given.
        total: What all clients hold.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._held: dict[Hashable, int] = {}

    def admits(self, client: Hashable, amount: int) -> bool:
        """Returns whether a client may hold some more."""
        if self.total + amount <= self.most:
            return True
        own = self._held.get(client, 0)
        clients = len(self._held) + (client not in self._held)
        return own + amount <= self.most // clients

    def add(self, client: Hashable, amount: int) -> None:
        """Notes that a client holds some more."""
        self.total += amount
        self._held[client] = self._held.get(client, 0) + amount

    def remove(self, client: Hashable, amount: int) -> None:
        """Notes that a client holds less."""
        self.total -= amount
        left = self._held.get(client, 0) - amount
        if left > 0:
            self._held[client] = left
        else:
            self._held.pop(client, None)

    def largest(self) -> Hashable:
        """Returns the client that holds most; None if nobody holds anything."""
        return max(self._held, key=self._held.__getitem__, default=None)


def client_of(host: str) -> str:
    """Returns the client of an address: the address itself, and for IPv6 its network of 64 bits, of which one
    client can use every address.
    """
    if ":" not in host:
        return host
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, ipaddress.IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))

"""Finds out whether the other end of a loopback connection belongs to the user who runs this server."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Linux' tables of this machine's connections, with the user of each.
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# The state of a connection that neither end has closed, in these tables.
ESTABLISHED = "01"

End = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def same_user(peer: tuple[str, int], here: tuple[str, int]) -> bool:
    """Whether the ``peer`` (address, port) of a connection to ``here`` belongs to this process's user, or to root, who
    can read everything anyway. False if that is unknown, as on systems other than Linux."""
    ends = _end(*peer), _end(*here)
    return any(uid in (os.getuid(), 0) for local, remote, uid in _connections() if (local, remote) == ends)


def _connections() -> Iterator[tuple[End, End, int]]:
    """Both ends and the user of every established connection. Once a program has closed its end, the table shows root
    as its user."""
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == ESTABLISHED:
                yield _of_hex(fields[1]), _of_hex(fields[2]), int(fields[7])


def _of_hex(text: str) -> End:
    """Parse an address as the kernel writes it: 32-bit words in the machine's byte order, and the port."""
    address, _, port = text.partition(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return _plain(ipaddress.ip_address(raw)), int(port, 16)


def _end(address: str, port: int) -> End:
    return _plain(ipaddress.ip_address(address)), port


def _plain(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address if it is mapped into IPv6, else the address unchanged."""
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped

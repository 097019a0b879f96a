"""Names to addresses, again and again: a service behind a name may be scaled or move.

Each address of a name is a peer of its own. Knows nothing of what is done with them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable

REFRESH_S = 2.0

Resolve = Callable[[str], Awaitable[set[str]]]


async def resolve(address: str) -> set[str]:
    """The host:port pairs behind `host:port`, or `address` itself if the name is not known now.

    A name with addresses of both families counts by its IPv4 ones, so that no peer is met twice.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or _is_ip(host):
        return {address}
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return {address}
    v4 = {f"{info[4][0]}:{port}" for info in infos if info[0] == socket.AF_INET}
    v6 = {f"[{info[4][0]}]:{port}" for info in infos if info[0] == socket.AF_INET6}
    return v4 or v6 or {address}


async def resolve_all(addresses: Iterable[str], resolve_one: Resolve = resolve) -> set[str]:
    """What all of them stand for together."""
    found = await asyncio.gather(*(resolve_one(address) for address in addresses))
    return set().union(*found)


def needs_refresh(addresses: Iterable[str]) -> bool:
    """Whether any of them is a name, which may stand for others later."""
    return any(not _is_ip(address.rpartition(":")[0].strip("[]")) for address in addresses)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

"""Names to addresses, again and again: a service behind a name may be scaled or move.

Each address of a name is a peer of its own. Knows nothing of what is done with them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

import structlog

log = structlog.get_logger(__name__)

REFRESH_S = 2.0

Resolve = Callable[[str], Awaitable[set[str]]]


async def resolve(address: str) -> set[str]:
    """The host:port pairs behind `host:port`, or `address` itself if the name is not known now.

    A name with addresses of both families counts by its IPv4 ones, so that no peer is met twice.
    """
    host, port = _host(address), address.rpartition(":")[2]
    if not host or _is_ip(host):
        return {address}
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for what can be no name, such as "a..b"
        return {address}
    v4 = {f"{info[4][0]}:{port}" for info in infos if info[0] == socket.AF_INET}
    v6 = {f"[{info[4][0]}]:{port}" for info in infos if info[0] == socket.AF_INET6}
    return v4 or v6 or {address}


class Names:
    """What a service's addresses stand for, now and later."""

    def __init__(self, addresses: Sequence[str], resolve: Resolve = resolve) -> None:
        self._addresses = list(addresses)
        self._resolve = resolve
        self._behind: dict[str, set[str]] = {}  # what each stood for when it was known last

    @property
    def may_change(self) -> bool:
        """Whether any of them is a name, which may stand for others later."""
        return any(not _is_ip(_host(each)) for each in self._addresses)

    async def look_up(self) -> set[str]:
        """All that they stand for; a name that is not known now, for what it did before."""
        found = await asyncio.gather(*(self._resolve(address) for address in self._addresses))
        for address, behind in zip(self._addresses, found, strict=True):
            if behind != {address} or address not in self._behind:
                self._behind[address] = behind
        return set().union(*self._behind.values())

    def host_of(self, address: str) -> str:
        """The host by which this service was told of an address; its certificate is for that."""
        for asked, behind in self._behind.items():
            if address in behind:
                return _host(asked)
        return _host(address)

    async def follow(self, take: Callable[[set[str]], Awaitable[None]]) -> None:
        """Give `take` what they stand for, again and again. What fails is logged and tried anew:
        the process would else never again find a service that moves."""
        while True:
            try:
                await take(await self.look_up())
            except Exception as error:
                log.error("discovery failed", addresses=self._addresses, exc_info=error)
            await asyncio.sleep(REFRESH_S)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

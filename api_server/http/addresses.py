"""Addresses of clients: which are of this machine, of one client, of a proxy."""

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_loopback(address: str) -> bool:
    parsed = _parse(address)
    return parsed is not None and parsed.is_loopback


def network_of(address: str) -> str:
    """Return an address of IPv4, or the /64 of one of IPv6, which belongs to one client."""
    parsed = _parse(address)
    if parsed is None:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False) if parsed.version == 6 else parsed)


class Proxies:
    """Proxies that are trusted to name their clients. names: addresses and networks."""

    def __init__(self, names: Iterable[str]) -> None:
        self._networks = [ipaddress.ip_network(name, strict=False) for name in names]

    def client_of(self, scope: Scope) -> str:
        """Return the address of a request's client; "unix" for one at a Unix socket.

        It is the last address in X-Forwarded-For that is not a trusted proxy's; without that
        header, the one in X-Real-IP. A client can forge the addresses before it.
        """
        client = scope.get("client")
        if not client:
            return "unix"
        address = str(client[0])
        headers = Headers(scope=scope)
        hops = ",".join(headers.getlist("x-forwarded-for")).split(",")
        if not any(map(str.strip, hops)):
            hops = headers.getlist("x-real-ip")
        for hop in reversed(hops):
            forwarded = _parse(_without_port(hop.strip()))
            if forwarded is None or not self._contain(address):
                break
            address = str(forwarded)
        return address

    def _contain(self, address: str) -> bool:
        parsed = _parse(address)
        return parsed is not None and any(parsed in network for network in self._networks)


def _parse(address: str) -> _Address | None:
    """Return an address, an IPv4 one in the form of IPv6 as IPv4; None if it is none."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _without_port(hop: str) -> str:
    found = re.fullmatch(r"\[([^\]]*)\](?::\d+)?|([^:]*):\d+", hop)
    return hop if found is None else found[1] or found[2]

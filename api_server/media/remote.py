"""Images from http and https URLs, only of hosts that the operator allows.

    URL ─▶ host allowed? ─▶ look up its addresses ─▶ all public? ─▶ connect to one of these
     ▲                                                                    │
     └────────────────────────────── redirect ────────────────────────────┘

A name is looked up once for each connection, and the connection goes to an address that was
checked, so a name that means another address a moment later reaches nothing. TLS and the Host
header have the name. No proxy is used, nothing is sent but the request line, and a body is taken as
it comes, never decompressed.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from api_server.media.sources import too_large
from proto.errors import InvalidRequestError, shown

MAX_REDIRECTS: Final = 5
MAX_URL: Final = 8192
"""Characters of a URL that is fetched."""
_look_ups: Final = ThreadPoolExecutor(max_workers=16, thread_name_prefix="names")
"""Threads of their own: look-ups have no time limit, and others must not wait for slow ones."""
_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_SAFE: Final = "!$%&'()*+,-./:;=?@[]_~"
"""Characters that stay as they are in the target of a request."""
MAX_NAME: Final = 253
MAX_LABEL: Final = 63
"""Characters of a host's name, and of each part between dots, by RFC 1035."""
_NEVER_PUBLIC: Final = tuple(
    map(
        ipaddress.ip_network,
        ("100.64.0.0/10", "168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24"),
    )
)
"""Networks that `is_global` does not exclude in every version of Python: shared addresses, the
server for virtual machines of Azure, protocol assignments, and relays of 6to4."""
_EMBEDDING: Final = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("2002::/16"))
"""Networks of IPv6 whose addresses have one of IPv4 in them: NAT64, in the last 32 bits, and 6to4,
which no host needs."""

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host, raises OSError."""


class ForbiddenAddressError(Exception):
    """The host has an address that must not be reached."""


def is_public(address: str) -> bool:
    """Return whether an address may belong to a host of the Internet.

    False for loopback, link-local, private, shared, multicast, unspecified and reserved addresses,
    also within an address of IPv6.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip in _EMBEDDING[0]:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip in _EMBEDDING[1] or ip.teredo is not None or ip.is_site_local or ip.scope_id:
            return False
    elif any(ip in network for network in _NEVER_PUBLIC):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host by the system's resolver; raises OSError."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.run_in_executor(
            _look_ups, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        )
    except UnicodeError:  # of a name that cannot be encoded
        raise OSError("invalid name of a host") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class AllowedHosts:
    """The hosts of --allowed-media-domains.

    domains: names, *.example for all names below one, with a port if it is not the scheme's own; *
    for all.
    """

    def __init__(self, domains: Iterable[str]) -> None:
        self._domains = frozenset(domain.lower().rstrip(".") for domain in domains)

    def allow(self, host: str, port: int, scheme: str) -> bool:
        names = [f"{host}:{port}"]
        if port == _PORTS[scheme]:
            above = host.split(".")[1:]
            names += ["*", host]
            names += ["*." + ".".join(above[first:]) for first in range(len(above))]
        return not self._domains.isdisjoint(names)


class _Target(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def _parse(url: str) -> _Target | None:
    """Return the parts of a URL; None if it is none of http or https, or if it has a login."""
    if (
        len(url) > MAX_URL
        or "\\" in url
        or any(ord(each) <= 32 or ord(each) == 127 for each in url)
    ):
        return None
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme, parts.hostname or ""
        port = parts.port or _PORTS[scheme]
        if not host.isascii():
            host = host.encode("idna").decode()
    except (ValueError, KeyError):
        return None
    host = host.removesuffix(".")
    labels = host.split(".")
    if len(host) > MAX_NAME or not all(1 <= len(label) <= MAX_LABEL for label in labels):
        return None
    if "@" in parts.netloc or "%" in host:
        return None
    path = quote(parts.path or "/", safe=_SAFE)
    return _Target(
        scheme, host, port, f"{path}?{quote(parts.query, safe=_SAFE)}" if parts.query else path
    )


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to hosts all of whose addresses are public."""

    def __init__(self, network: httpcore.AsyncNetworkBackend, resolver: Resolver) -> None:
        self._network = network
        self._resolver = resolver

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises ForbiddenAddressError before anything is sent, OSError if there is no address."""
        addresses = await self._resolver(host, port)
        if not all(map(is_public, addresses)):
            raise ForbiddenAddressError
        error: Exception = OSError("no address")
        for address in addresses:
            try:
                return await self._network.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout, OSError) as failure:
                error = failure
        raise error


class RemoteImages:
    """Fetches images from allowed hosts.

    seconds: for an image with all redirects. resolver, network, tls: of tests; by default the
    system's.
    """

    def __init__(
        self,
        domains: Iterable[str],
        max_bytes: int,
        seconds: float,
        resolver: Resolver = resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = AllowedHosts(domains)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._network = _CheckedNetwork(network or httpcore.AnyIOBackend(), resolver)
        self._tls = tls

    async def fetch(self, url: str) -> bytes:
        """Return the body that a URL leads to.

        Raises InvalidRequestError, also for all failures of the other server.
        """
        try:
            async with asyncio.timeout(self._seconds):
                return await self._follow(url)
        except TimeoutError:
            raise InvalidRequestError(
                f"the image could not be fetched within {self._seconds:g} s"
            ) from None
        except ForbiddenAddressError:
            raise InvalidRequestError(
                "the host of the image has an address that images are not loaded from"
            ) from None
        except (OSError, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
            raise InvalidRequestError("the image could not be fetched from its host") from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            content, location = await self._get(self._checked(url))
            if location is None:
                return content
            try:
                url = urljoin(url, location)
            except ValueError:
                raise InvalidRequestError("the image has an invalid redirect") from None
        raise InvalidRequestError(f"the image has more than {MAX_REDIRECTS} redirects")

    def _checked(self, url: str) -> _Target:
        target = _parse(url)
        if target is None:
            raise InvalidRequestError(
                "the image has a URL, or a redirect to one, that is invalid, has a login or is not "
                "of http or https",
            )
        if not self._hosts.allow(target.host, target.port, target.scheme):
            raise InvalidRequestError(
                f"images are not loaded from {shown(target.host_header)}: it is not among "
                "--allowed-media-domains",
            )
        return target

    async def _get(self, target: _Target) -> tuple[bytes, str | None]:
        """Return the body of a response, or an empty one and where it redirects to."""
        if target.scheme == "https" and self._tls is None:
            self._tls = await asyncio.to_thread(httpcore.default_ssl_context)
        url = httpcore.URL(
            scheme=target.scheme, host=target.host, port=target.port, target=target.path
        )
        headers = [("Host", target.host_header), ("Accept", "image/*"), ("User-Agent", "tokend")]
        async with (
            httpcore.AsyncConnectionPool(self._tls, network_backend=self._network) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            fields = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in fields:
                return b"", fields[b"location"]
            if response.status != 200:
                raise InvalidRequestError(
                    f"the host of the image answered with status {response.status}"
                )
            size = fields.get(b"content-length", "")
            self._check_size(int(size) if size.isascii() and size.isdecimal() else 0)
            content = bytearray()
            async for part in response.aiter_stream():
                content += part
                self._check_size(len(content))
            return bytes(content), None

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise too_large(self._max_bytes)

"""URLs of images reach allowed hosts with public addresses, and nothing else."""

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpcore
import pytest

from api_server.media.remote import AllowedHosts, RemoteImages, is_public, resolve
from proto.errors import InvalidRequestError
from tests.fakes.certificates import Authority, needs_openssl

PUBLIC = "93.184.216.34"
PRIVATE = [
    *("127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
    *("169.254.169.254", "100.64.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
    *("192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fe80::1%lo", "fc00::1", "fd12::1"),
    *("ff02::1", "2001:db8::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254"),
    *("::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::"),
    *("100.127.255.255", "168.63.129.16", "192.0.0.9", "192.0.0.192", "192.88.99.1"),
    *("::ffff:168.63.129.16", "64:ff9b::a83f:8110"),
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "nonsense", ""),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_never_reached(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [PUBLIC, "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_entries_name_hosts_subdomains_ports_or_all() -> None:
    hosts = AllowedHosts(
        ["images.example", "*.cdn.example", "other.example:8080", "third.example:443"]
    )
    allowed = [("images.example", 443), ("a.cdn.example", 443), ("a.b.cdn.example", 443)]
    allowed += [("other.example", 8080), ("third.example", 443)]
    refused = [("images.example", 8080), ("x.images.example", 443), ("cdn.example", 443)]
    refused += [("other.example", 443), ("evilimages.example", 443), ("example", 443)]
    assert all(hosts.allow(host, port, "https") for host, port in allowed)
    assert not any(hosts.allow(host, port, "https") for host, port in refused)
    assert AllowedHosts(["*"]).allow("any.example", 80, "http")
    assert not AllowedHosts(["*"]).allow("any.example", 22, "http")


class Server:
    """An HTTP server on a port of this machine that answers paths with whole responses."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.names: list[str | None] = []
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(request)
            answer = self.answers[request.split(" ")[1]]
            if answer == b"never":
                await reader.read()
            writer.write(answer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def redirect(self, path: str, location: str) -> None:
        head = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
        self.answers[path] = head.encode()


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", *headers]
    if not headers:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Network(httpcore.AnyIOBackend):
    """Connects to the server for any address, and notes the addresses."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.addresses: list[str] = []

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        self.addresses.append(host)
        return await super().connect_tcp("127.0.0.1", self._server.port, timeout)


class Names:
    """Addresses of names; the last ones stay."""

    def __init__(self, **lookups: Sequence[str]) -> None:
        """lookups: of a name with _ for its dots, an address for each look-up."""
        self._left = {name.replace("_", "."): list(found) for name, found in lookups.items()}
        self.num_lookups = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.num_lookups += 1
        found = self._left.get(host)
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown name, with a secret")
        return (found.pop(0) if len(found) > 1 else found[0]).split()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    yield server
    listening.close()


class Case:
    """A reader of remote images, whose hosts are on the local server."""

    def __init__(self, server: Server, names: Names | None = None, **options) -> None:
        self.names = names or Names(images_example=[PUBLIC], other_example=[PUBLIC])
        self.network = Network(server)
        settings = {"domains": ["images.example"], "max_bytes": 100, "seconds": 20.0, **options}
        self.images = RemoteImages(**settings, resolver=self.names, network=self.network)

    async def fetch(self, url: str) -> bytes:
        return await self.images.fetch(url)

    async def error(self, url: str) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            await self.fetch(url)
        assert "secret" not in caught.value.message
        return caught.value.message


async def test_a_body_is_fetched_from_the_checked_address_under_its_name(server) -> None:
    server.answers["/a/b.png?x=1&y=%20"] = ok(b"image")
    case = Case(server)
    assert await case.fetch("http://Images.Example/a/b.png?x=1&y=%20#part") == b"image"
    assert case.network.addresses == [PUBLIC]
    assert case.names.num_lookups == 1
    head = server.requests[0].lower()
    assert "host: images.example\r\n" in head
    assert not any(name in head for name in ("cookie", "authorization", "referer"))


async def test_a_port_that_the_entry_names_is_in_the_host_header(server) -> None:
    server.answers["/"] = ok(b"image")
    case = Case(server, domains=["images.example:8080"])
    assert await case.fetch("http://images.example:8080") == b"image"
    assert "host: images.example:8080\r\n" in server.requests[0].lower()


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/",
        "http://images.example.other.example/",
        "http://images.example:8080/",
        "http://images.example@other.example/",
        "http://images.example:secret@images.example/",
        "http://other.example\\@images.example/",
        "http://images.example\t.other.example/",
        "http://images.example /",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:169.254.169.254]/",
        "http://2852039166/",
        "http://0x7f.1/",
        "http:///path",
        "http://images.example:99999/",
        "http://[images.example/",
        "http://ｉmages.example\u3002other.example/",
        "http://" + "a" * 9000,
        "http://a..images.example/",
        "http://.images.example/",
        "http://images.example../",
        f"http://{'a' * 64}.images.example/",
        f"http://{'a.' * 120}images.example/",
    ],
)
async def test_urls_of_other_hosts_are_refused_before_a_look_up(server, url: str) -> None:
    case = Case(server, domains=["images.example", "*.images.example"])
    await case.error(url)
    assert (case.names.num_lookups, case.network.addresses) == (0, [])


@pytest.mark.parametrize("address", PRIVATE[:-2])
async def test_an_allowed_host_with_a_private_address_is_not_reached(server, address) -> None:
    names = Names(images_example=[f"{PUBLIC} {address}"])
    case = Case(server, names, domains=["*"])
    assert "address" in await case.error("http://images.example/")
    assert case.network.addresses == []


@pytest.mark.parametrize("url", ["http://169.254.169.254/", "http://127.0.0.1/", "http://[::1]/"])
async def test_addresses_as_hosts_are_checked_when_all_hosts_are_allowed(server, url) -> None:
    host = url[7:-1].strip("[]")
    names = Names()
    names._left[host] = [host]
    case = Case(server, names, domains=["*"])
    assert "address" in await case.error(url)
    assert case.network.addresses == []


async def test_the_second_look_up_of_a_name_reaches_nothing_else(server) -> None:
    """A name server answers with a public address first and with a private one after that."""
    server.answers["/"] = ok(b"image")
    server.redirect("/again", "http://images.example/")
    case = Case(server, Names(images_example=[PUBLIC, "169.254.169.254"]))
    assert "address" in await case.error("http://images.example/again")
    assert case.network.addresses == [PUBLIC]
    case = Case(server, Names(images_example=[PUBLIC, "169.254.169.254"]))
    assert await case.fetch("http://images.example/") == b"image"
    assert case.network.addresses == [PUBLIC]


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/",
        "http://other.example/",
        "//other.example/",
        "file:///etc/passwd",
        "http://[",
    ],
)
async def test_redirects_to_other_hosts_are_refused(server, location: str) -> None:
    server.redirect("/", location)
    case = Case(server)
    await case.error("http://images.example/")
    assert case.network.addresses == [PUBLIC]


async def test_redirects_are_followed_to_a_limit(server) -> None:
    for number in range(6):
        server.redirect(f"/{number}", f"/{number + 1}")
    server.answers["/6"] = ok(b"image")
    case = Case(server)
    assert await case.fetch("http://images.example/1") == b"image"
    assert "redirects" in await case.error("http://images.example/0")


@pytest.mark.parametrize(
    "answer",
    [
        ok(bytes(101)),
        ok(bytes(5), "Content-Length: 100000000000"),
        ok(bytes(200), "Connection: close"),
        ok(b"c8\r\n" + bytes(200) + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    ],
    ids=["a body", "an announced body", "a body to the end", "chunks"],
)
async def test_bytes_have_a_limit(server, answer: bytes) -> None:
    server.answers["/"] = answer
    assert "more than 100 bytes" in await Case(server).error("http://images.example/")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 Not Found secret\r\nContent-Length: 6\r\n\r\nsecret", "status 404"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "status 302"),
        (b"secret\r\n\r\n", "could not be fetched"),
        (ok(b"image", "Content-Length: 50"), "could not be fetched"),
        (b"", "could not be fetched"),
    ],
)
async def test_failures_of_the_other_server_are_errors_of_the_request(
    server, answer: bytes, message: str
) -> None:
    server.answers["/"] = answer
    assert message in await Case(server).error("http://images.example/")


async def test_an_unknown_name_is_an_error_of_the_request(server) -> None:
    case = Case(server, domains=["unknown.example"])
    assert "could not be fetched" in await case.error("https://unknown.example/")


@pytest.mark.parametrize("host", ["a..example", f"{'a' * 64}.example"])
async def test_names_that_cannot_be_encoded_have_no_address(host: str) -> None:
    with pytest.raises(OSError, match="invalid name"):
        await resolve(host, 80)


async def test_look_ups_take_no_threads_of_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name servers do not answer, and yet an image is decoded on a thread."""
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait() and [])
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    look_ups = [asyncio.create_task(resolve("a.example", 80)) for _ in range(3)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(lambda: 1) == 1
    finally:
        answer.set()
    assert await asyncio.gather(*look_ups) == [[], [], []]


async def test_time_has_a_limit_over_all_redirects(server) -> None:
    server.redirect("/", "/never")
    server.answers["/never"] = b"never"
    assert "within 0.3 s" in await Case(server, seconds=0.3).error("http://images.example/")


async def test_proxies_of_the_environment_are_not_used(server, monkeypatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.answers["/"] = ok(b"image")
    case = Case(server)
    assert await case.fetch("http://images.example/") == b"image"
    assert case.network.addresses == [PUBLIC]


@needs_openssl
async def test_tls_has_the_name_and_not_the_address(tmp_path: Path) -> None:
    """The certificate is checked against the name; this one is of an address."""
    authority, server = Authority(tmp_path), Server()
    pair = authority.sign("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    context.sni_callback = lambda _, name, __: server.names.append(name)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=context)
    server.port = listening.sockets[0].getsockname()[1]
    server.answers["/"] = ok(b"image")
    strict = ssl.create_default_context(cafile=authority.certificate)
    case = Case(server, tls=strict)
    assert "could not be fetched" in await case.error("https://images.example/")
    lenient = ssl.create_default_context(cafile=authority.certificate)
    lenient.check_hostname = False
    case = Case(server, tls=lenient)
    assert await case.fetch("https://images.example/") == b"image"
    assert server.names == ["images.example"] * 2
    listening.close()

"""A real front end behind TLS."""

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from api_server.http.http_protocol import MAX_HEADER_BYTES
from proto.settings.config import FrontEndConfig
from tests.fakes.certificates import Authority, Pair, needs_openssl

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Pair:
    return authority.sign("server")


def client(front_end, context: ssl.SSLContext) -> httpx.AsyncClient:
    url = front_end.url.replace("http:", "https:")
    return httpx.AsyncClient(base_url=url, verify=context, timeout=60)


@pytest.mark.parametrize("number", [1, 2])
async def test_answers_and_streams(start, scripted, authority, server, number: int):
    """number: of front ends, since several of them accept connections in another way."""
    config = FrontEndConfig(
        ssl_certfile=server.certificate, ssl_keyfile=server.key, api_server_count=number
    )
    async with start(scripted("the sea"), config=config) as front_end:
        async with client(front_end, authority.client_context()) as http:
            body = {"prompt": "hello", "max_tokens": 64}
            answer = await http.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == "the sea"
            answer = await http.post("/v1/completions", json={**body, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.RemoteProtocolError):
            await front_end.http.get("/health")
        async with client(front_end, ssl.create_default_context()) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/health")


async def test_client_certificates_are_required(start, authority, server, tmp_path: Path):
    config = FrontEndConfig(
        ssl_certfile=server.certificate,
        ssl_keyfile=server.key,
        ssl_ca_certs=authority.certificate,
        ssl_cert_reqs=2,
    )
    other = Authority(tmp_path, "other")
    async with start(config=config) as front_end:
        known = authority.client_context(authority.sign("client"))
        async with client(front_end, known) as http:
            assert (await http.get("/health")).status_code == 200
        for context in (
            authority.client_context(),
            authority.client_context(other.sign("client")),
        ):
            async with client(front_end, context) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/health")


async def test_too_many_headers_are_refused_like_without_tls(start, authority, server):
    config = FrontEndConfig(ssl_certfile=server.certificate, ssl_keyfile=server.key)
    async with start(config=config) as front_end:
        port = httpx.URL(front_end.url).port
        context = authority.client_context()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nx: " + b"y" * MAX_HEADER_BYTES)
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"RequestHeadersTooLargeError")
        assert answer.startswith(b"HTTP/1.1 431 ")
        writer.close()

"""The log lines of requests: one for each, refused or not, with its origin and without secrets."""

import asyncio
import json
import logging
from collections.abc import Callable

import pytest
from websockets.exceptions import InvalidStatus

from api_server.http.addresses import Proxies
from api_server.http.request_log import ADDRESS_LINES, ALL_LINES, MAX_ADDRESSES, RequestLog
from proto.errors import AuthenticationError, ErrorInfo
from proto.runtime.log_lines import FIELDS, JsonLines
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import websocket
from tests.fakes.clock import FakeClock

KEY = "hush-5f2c"
SECRET = "Rumpelstiltskin"

Lines = Callable[[], list[dict[str, object]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Return the fields of the lines since the last call; none has the key or the secret."""
    caplog.set_level(logging.INFO)

    def pop() -> list[dict[str, object]]:
        text = "\n".join(JsonLines("api 0").format(record) for record in caplog.records)
        assert SECRET not in text + caplog.text
        assert KEY not in text + caplog.text
        found = [record for record in caplog.records if record.name == "tokend.requests"]
        others = [
            record
            for record in caplog.records
            if record not in found and record.levelno >= logging.WARNING
        ]
        assert not others, others
        caplog.clear()
        return [getattr(record, FIELDS) for record in found]

    return pop


async def one(lines: Lines) -> dict[str, object]:
    async with asyncio.timeout(10):
        while not (found := lines()):
            await asyncio.sleep(0.01)
    (line,) = found
    return line


CHAT = {"messages": [{"role": "user", "content": SECRET}]}
REFUSED: dict[str, tuple[str, str, dict[str, object], dict[str, object]]] = {
    "a field": ("POST", "/v1/completions", {"json": {"prompt": SECRET, "n": SECRET}},
                {"finish": "error 400", "param": "n"}),
    "parts of text": ("POST", "/v1/chat/completions",
                      {"json": {"messages": [{"role": "user", "content": {SECRET: 1}}]}},
                        {"finish": "error 400", "param": "messages"}),
    "a key of the client's": ("POST", "/v1/completions",
                              {"content": f'{{"{SECRET}": 1, "{SECRET}": 2}}',
                               "headers": {"content-type": "application/json"}},
                              {"finish": "error 400"}),
    "no JSON": ("POST", "/v1/completions",
                {"content": SECRET, "headers": {"content-type": "application/json"}},
                {"finish": "error 400", "status": 400,
                 "reason": "the body is not valid JSON: Expecting value: line 1 column 1"}),
    "no host": ("GET", "/v1/models", {"headers": {"host": "a b"}},
                {"finish": "error 400",
                 "reason": "a request has one Host header, with a name or an address"}),
    "the context": ("POST", "/v1/completions", {"json": {"prompt": SECRET * 300}},
                    {"finish": "error 400", "code": "context_length_exceeded"}),
    "a model": ("POST", "/v1/chat/completions", {"json": CHAT | {"model": "gpt-9"}},
                {"finish": "error 404", "param": "model"}),
    "a path": ("POST", "/v1/v1/completions", {"json": CHAT},
               {"finish": "error 404", "reason": "POST /v1/v1/completions: Not Found"}),
    "a method": ("GET", "/v1/completions", {}, {"finish": "error 405"}),
    "a type": ("POST", "/v1/completions", {"content": SECRET}, {"finish": "error 415"}),
    "Anthropic's": ("POST", "/v1/messages", {"json": CHAT | {"model": "toy"}},
                    {"finish": "error 400", "param": "max_tokens"}),
    "an operator's route": ("POST", "/pause", {"headers": {"x-forwarded-for": "192.0.2.7"}},
                            {"finish": "error 403", "client": "192.0.2.7"}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_each_refused_request_is_one_line(start, lines, case):
    method, path, fields, expected = REFUSED[case]
    async with start(accepts=True) as front_end:
        headers = {**fields.pop("headers", {}), "x-session-id": "s 1"}
        response = await front_end.http.request(method, path, headers=headers, **fields)
        line = await one(lines)
    status = int(str(expected["finish"]).split()[1])
    assert response.status_code == status, response.text
    assert line == line | {"endpoint": path, "tenant": None, "session": "s 1"} | expected
    assert line["client"] == expected.get("client", "127.0.0.1")


async def test_a_tenant_that_is_no_name(start, lines):
    async with start(config=FrontEndConfig(tenant_by="header"), accepts=True) as front_end:
        headers = {"x-tenant-id": SECRET + " x"}
        body = {"prompt": "hello"}
        response = await front_end.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 400
        line = await one(lines)
        assert line["param"] == "X-Tenant-ID"
        assert str(line["reason"]).startswith("X-Tenant-ID takes one name of 1 to 128 letters")


def test_a_long_reason_is_cut_in_the_text_only(caplog):
    caplog.set_level(logging.INFO)
    RequestLog(FrontEndConfig()).log_refusal(
        AuthenticationError("long " * 50), scope_of("192.0.2.1")
    )
    (record,) = caplog.records
    assert record.getMessage().endswith('long…"')
    assert getattr(record, FIELDS)["reason"] == "long " * 50
    assert getattr(record, FIELDS)["status"] == 401
    assert "status=" not in record.getMessage()


async def test_wrong_keys_hosts_and_origins(start, lines):
    config = FrontEndConfig(api_key=KEY)
    async with start(config=config) as front_end:
        for headers in ({}, {"authorization": f"Bearer {KEY}x"}):
            assert (await front_end.http.get("/v1/models", headers=headers)).status_code == 401
            line = await one(lines)
            assert (line["finish"], line["endpoint"]) == ("error 401", "/v1/models")
            assert line["reason"] == "missing or wrong API key"
        with pytest.raises(InvalidStatus, match="401"):
            async with websocket(front_end, "/v1/sessions"):
                pass
        assert (await one(lines))["finish"] == "error 401"
        assert (await front_end.http.get("/health")).status_code == 200
    async with start() as front_end:
        refused = await front_end.http.get("/v1/models", headers={"host": "evil.example"})
        assert refused.status_code == 403
        assert "evil.example" in str((await one(lines))["reason"])
        with pytest.raises(InvalidStatus, match="403"):
            async with websocket(front_end, "/v1/sessions", Origin="https://evil.example"):
                pass
        assert (await one(lines))["finish"] == "error 403"
        with pytest.raises(InvalidStatus, match="404"):
            async with websocket(front_end, "/v1/nothing"):
                pass
        assert (await one(lines))["finish"] == "error 404"


async def test_requests_that_do_not_reach_the_application(start, lines):
    async with start(config=FrontEndConfig(allowed_origins=("https://chat.example",))) as front_end:
        port = front_end.http.base_url.port
        for text, status, endpoint in (
            ("NONSENSE\r\n\r\n", 400, None),
            (f"GET /v1/models HTTP/1.1\r\nhost: x\r\na: {'b' * 70000}\r\n\r\n", 431, "/v1/models"),
            ("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n"
             "content-type: application/json\r\n\r\n", 413, "/v1/completions"),
            ("GET /v1/sessions HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n"
             "connection: upgrade\r\nsec-websocket-key: x\r\nsec-websocket-version: 13\r\n\r\n",
             400, "/v1/sessions"),
        ):  # fmt: skip
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(text.encode())
            assert str(status).encode() in await reader.readline()
            writer.close()
            line = await one(lines)
            assert (line["finish"], line["endpoint"]) == (f"error {status}", endpoint), text[:20]
            assert line["client"] == "127.0.0.1"
        headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        refused = await front_end.http.options("/v1/models", headers=headers)
        assert refused.status_code == 400
        assert (await one(lines))["finish"] == "error 400"


async def test_messages_of_websockets_that_are_refused(start, lines):
    async with start(accepts=True) as front_end:
        for path in ("/v1/sessions", "/v1/responses"):
            async with websocket(front_end, path) as client:
                await client.send(json.dumps({"type": SECRET}))
                await client.recv()
                line = await one(lines)
                assert line["endpoint"] == path
                assert (line["finish"], line["param"]) == ("error 400", "type")


async def test_computed_requests_have_their_origin_and_one_line_if_they_fail(
    start, scripted, lines, tmp_path
):
    (tmp_path / "keys").write_text(f"alice {KEY}\n")
    config = FrontEndConfig(api_key_file=str(tmp_path / "keys"), tenant_by="header")
    headers = {"authorization": f"Bearer {KEY}", "x-tenant-id": "team-1", "x-session-id": "agent-7"}
    origin = {"tenant": "alice/team-1", "session": "agent-7", "client": "127.0.0.1"}
    async with start(scripted("fox"), config=config) as front_end:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": SECRET}),
            ("/v1/responses", {"input": SECRET}),
            ("/v1/messages", CHAT | {"max_tokens": 9, "model": "toy"}),
        ):
            response = await front_end.http.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text
            line = await one(lines)
            assert line == line | origin | {"endpoint": path, "finish": "stop"}
    async with start(accepts=True, config=config) as front_end:
        for path, body in (
            ("/v1/completions", {"prompt": SECRET}),
            ("/v1/messages", CHAT | {"max_tokens": 9, "model": "toy"}),
        ):
            asked = asyncio.create_task(front_end.http.post(path, json=body, headers=headers))
            request = await front_end.engine.requests.get()
            front_end.engine.refuse(request, ErrorInfo("queue_full", "full", "max_num_queued_reqs"))
            assert (await asked).status_code == 503
            line = await one(lines)
            assert line == line | origin | {
                "endpoint": path,
                "finish": "error 503",
                "status": 503,
                "error": "overloaded_error",
                "param": "max_num_queued_reqs",
                "reason": "full",
            }
            assert "id" in line, "the line is that of the stream"
        asked = asyncio.create_task(
            front_end.http.post("/v1/completions", json={"prompt": SECRET}, headers=headers)
        )
        await front_end.engine.requests.get()
        asked.cancel()
        line = await one(lines)
        assert line == line | origin | {"finish": "abort", "cause": "disconnect"}


async def test_what_operators_change_has_a_line(start, lines):
    async with start() as front_end:
        assert (await front_end.http.post("/pause?mode=abort")).status_code == 200
        line = await one(lines)
        assert line == line | {"endpoint": "/pause", "query": "mode=abort", "status": 200}
        assert (await front_end.http.get("/server_info")).status_code == 200
        assert not lines()


@pytest.mark.parametrize("stays_silent", [True, False])
async def test_settings_of_the_lines(start, scripted, lines, stays_silent):
    config = FrontEndConfig(disable_log_requests=stays_silent, log_client_address=False)
    async with start(scripted("fox"), config=config) as front_end:
        await front_end.complete()
        assert (await front_end.complete(n=-1)).status_code == 400
        assert (await front_end.http.get("/nothing")).status_code == 404
        found = lines()
    assert len(found) == (0 if stays_silent else 3)
    assert not any("client" in line for line in found)


async def test_health_checks_of_a_daemon_that_drains_have_no_line(start, lines):
    async with start() as front_end:
        front_end.app_state.health.start_drain()
        assert (await front_end.http.get("/health")).status_code == 503
        assert not lines()
        assert (await front_end.complete()).status_code == 503
        assert (await one(lines))["finish"] == "error 503"


def scope_of(address: str, *headers: tuple[str, str], path: str = "/x") -> dict[str, object]:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return {"type": "http", "client": (address, 1), "path": path, "headers": raw}


async def test_a_flood_has_a_limited_number_of_lines_and_its_rest_is_counted(lines, caplog):
    clock = FakeClock()
    log = RequestLog(FrontEndConfig(), clock)

    def refuse(address: str, number: int) -> int:
        for _ in range(number):
            log.log_refusal(AuthenticationError("wrong"), scope_of(address))
        return len([record for record in caplog.records if hasattr(record, FIELDS)])

    assert refuse("192.0.2.1", 1000) == ADDRESS_LINES
    assert refuse("192.0.2.2", 1) == ADDRESS_LINES + 1, "another client has its own lines"
    clock.now += 1.0
    assert refuse("192.0.2.1", 1000) == ADDRESS_LINES + 6
    for number in range(2 * MAX_ADDRESSES):
        refuse(f"2001:db8:{number:x}::1", 1)
    assert refuse("192.0.2.9", 1) <= ALL_LINES + 51
    assert len(log._by_address) <= MAX_ADDRESSES
    caplog.clear()
    async with asyncio.timeout(10):
        while not caplog.records:
            await asyncio.sleep(0.05)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert getattr(record, FIELDS)["left_out"] > 1000


def test_what_a_client_writes_cannot_forge_a_line(caplog):
    caplog.set_level(logging.INFO)
    log = RequestLog(FrontEndConfig())
    scope = scope_of(
        "192.0.2.1", ("x-session-id", 'a" tenant=root'), path="/x\n12:00:00 INFO api 0: forged"
    )
    log.log_refusal(AuthenticationError("wrong"), scope)
    (record,) = caplog.records
    assert record.getMessage() == (
        'endpoint="/x\\n12:00:00 INFO api 0: forged" tenant=- client=192.0.2.1 '
        'session="a\\" tenant=root" finish=error 401 error=AuthenticationError reason=wrong'
    )


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("127.0.0.1", [], "127.0.0.1"),
        ("192.0.2.1", [("x-forwarded-for", "198.51.100.7")], "192.0.2.1"),
        ("127.0.0.1", [("x-forwarded-for", "198.51.100.7")], "198.51.100.7"),
        ("::ffff:127.0.0.1", [("x-forwarded-for", "198.51.100.7:99")], "198.51.100.7"),
        ("127.0.0.1", [("x-forwarded-for", "[2001:db8::1]:99")], "2001:db8::1"),
        ("127.0.0.1", [("x-forwarded-for", "6.6.6.6, 198.51.100.7")], "198.51.100.7"),
        ("127.0.0.1", [("x-forwarded-for", "6.6.6.6, 198.51.100.7, 10.1.2.3")], "198.51.100.7"),
        (
            "10.0.0.1",
            [("x-forwarded-for", "6.6.6.6"), ("x-forwarded-for", "198.51.100.7")],
            "198.51.100.7",
        ),
        ("127.0.0.1", [("x-forwarded-for", "10.1.2.3\nforged")], "127.0.0.1"),
        ("127.0.0.1", [("x-real-ip", "198.51.100.7")], "198.51.100.7"),
        (
            "127.0.0.1",
            [("x-forwarded-for", "198.51.100.8"), ("x-real-ip", "6.6.6.6")],
            "198.51.100.8",
        ),
    ],
)
def test_the_client_behind_proxies(peer, headers, client):
    proxies = Proxies(("127.0.0.1", "::1", "10.0.0.0/8"))
    assert proxies.client_of(scope_of(peer, *headers)) == client


def test_a_client_at_a_unix_socket():
    assert Proxies(()).client_of({"client": None}) == "unix"

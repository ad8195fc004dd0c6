"""W3C trace context and the spans of OpenTelemetry."""

import asyncio
import logging
import time
from contextlib import asynccontextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from api_server.generation import tracing
from deploy import serve
from proto.errors import ConfigError, ErrorInfo
from proto.messages.engine_io import EngineCoreEvent, EventType, FinishReason
from proto.runtime.log_lines import FIELDS
from proto.settings.config import FrontEndConfig, ServeConfig
from proto.settings.config_checks import validate

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hello"}],
    },
}
TRACED = FrontEndConfig(otlp_traces_endpoint="http://localhost:4317")


@pytest.mark.parametrize("path", BODIES)
async def test_the_trace_id_reaches_the_engine_and_the_log(start, scripted, caplog, path):
    caplog.set_level(logging.INFO, logger="tokend.requests")
    headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
    async with start(scripted("fox")) as front_end:
        response = await front_end.http.post(path, json=BODIES[path], headers=headers)
        assert response.status_code == 200, response.text
        request = await front_end.engine.requests.get()
        assert request.trace_headers == headers
        assert request.trace_id == TRACE
        assert front_end.app_state.tracer is None
    assert f"trace_id={TRACE}" in caplog.text
    assert getattr(caplog.records[-1], FIELDS)["trace_id"] == TRACE


@pytest.mark.parametrize(
    "parent",
    [
        None,
        "garbage",
        PARENT.upper(),
        f"ff-{TRACE}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        PARENT + "-more",
    ],
)
async def test_invalid_trace_headers_are_ignored(start, scripted, caplog, parent):
    caplog.set_level(logging.INFO, logger="tokend.requests")
    headers = {"tracestate": "vendor=1"} | ({} if parent is None else {"traceparent": parent})
    async with start(scripted("fox")) as front_end:
        body = BODIES["/v1/completions"]
        await front_end.http.post("/v1/completions", json=body, headers=headers)
        assert (await front_end.engine.requests.get()).trace_headers == {}
    assert "trace_id" not in caplog.text


@pytest.fixture
def spans(monkeypatch):
    """spans(front_end): the finished spans, collected in memory."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "span_exporter", lambda endpoint: exporter)

    def finished(front_end):
        front_end.app_state.tracer._provider.force_flush()
        return exporter.get_finished_spans()

    return finished


async def test_a_request_is_a_span_in_its_trace(start, spans):
    async with start(accepts=True, config=TRACED) as front_end:
        body = {"prompt": "hello", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
        body["request_id"] = "mine"
        headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
        asking = asyncio.create_task(
            front_end.http.post("/v1/completions", json=body, headers=headers)
        )
        request = await front_end.engine.requests.get()
        front_end.engine.num_cached_tokens = 1
        front_end.engine.emit(request, [40])
        preempted = EngineCoreEvent(EventType.PREEMPTED, time.monotonic())
        front_end.engine.emit(request, [41], finish=FinishReason.LENGTH, events=(preempted,))
        assert (await asking).status_code == 200
        (span,) = spans(front_end)
    assert [each.name for each in span.events] == ["queued", "scheduled", "preempted"]
    assert span.start_time < span.events[0].timestamp < span.events[2].timestamp < span.end_time
    assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert span.context.trace_state.get("vendor") == "1"
    attributes = dict(span.attributes)
    latencies = {name: attributes.pop(name) for name in list(attributes) if "latency" in name}
    assert attributes == {
        "gen_ai.request.id": "cmpl-mine",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.model": "toy",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.usage.cached_tokens": 1,
    }
    assert {name.removeprefix("gen_ai.latency.") for name in latencies} == {
        *("e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill"),
        *("time_in_model_decode", "time_in_model_inference"),
    }
    assert latencies["gen_ai.latency.e2e"] == pytest.approx(
        (span.end_time - span.start_time) / 1e9, abs=1e-4
    )


async def test_a_failed_request_is_a_span_with_an_error(start, spans):
    async with start(config=TRACED) as front_end:
        asking = asyncio.create_task(front_end.complete())
        request = await front_end.engine.requests.get()
        front_end.engine.refuse(request, ErrorInfo("invalid_request", "too long", "prompt"))
        assert (await asking).status_code == 400
        (span,) = spans(front_end)
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "too long"
    assert span.attributes["error.type"] == "BadRequestError"


async def test_a_request_without_a_trace_starts_a_logged_one(start, scripted, spans, caplog):
    caplog.set_level(logging.INFO, logger="tokend.requests")
    async with start(scripted("fox"), config=TRACED) as front_end:
        await front_end.complete()
        (span,) = spans(front_end)
    assert span.parent is None
    assert f"trace_id={span.context.trace_id:032x}" in caplog.text


async def test_a_trace_that_is_not_sampled_is_not_exported(start, scripted, spans):
    async with start(scripted("fox"), config=TRACED) as front_end:
        body = BODIES["/v1/completions"]
        headers = {"traceparent": PARENT[:-2] + "00"}
        await front_end.http.post("/v1/completions", json=body, headers=headers)
        assert spans(front_end) == ()


@asynccontextmanager
async def collector():
    """An OTLP collector over HTTP: its address and the received bodies."""
    bodies = asyncio.Queue()

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        bodies.put_nowait(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1/traces", bodies


async def test_spans_reach_a_collector(start, scripted, monkeypatch):
    monkeypatch.setenv(tracing.PROTOCOL_VARIABLE, "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    async with collector() as (endpoint, bodies):
        config = FrontEndConfig(otlp_traces_endpoint=endpoint)
        async with start(scripted("fox"), config=config) as front_end:
            await front_end.complete()
            await asyncio.to_thread(front_end.app_state.tracer.close)
        export = ExportTraceServiceRequest.FromString(bodies.get_nowait())
    (resource,) = export.resource_spans
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert names["service.name"] == "tokend"
    assert resource.scope_spans[0].spans[0].name == "llm_request"


def test_the_endpoint_is_a_url():
    config = ServeConfig(frontend=FrontEndConfig(otlp_traces_endpoint="localhost:4317"))
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be a URL"):
        validate(config)


def test_without_the_packages_the_flag_is_an_error(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*opentelemetry-sdk"):
        serve._check_tracing(ServeConfig(frontend=TRACED))
    serve._check_tracing(ServeConfig())

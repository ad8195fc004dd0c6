"""W3C trace context of requests and, with `--otlp-traces-endpoint`, OpenTelemetry spans.

A request's `traceparent` and `tracestate` travel to the engine (`EngineCoreRequest.trace_headers`)
and appear as `trace_id` in log lines. Names of spans and attributes are vLLM's.
"""

import os
import re
import time
from typing import Any, Final

from starlette.requests import HTTPConnection

from api_server.generation.request_stream import RequestStream
from proto.messages.engine_io import EngineCoreRequest

TraceHeaders = dict[str, str]
"""`traceparent` and perhaps `tracestate`; empty without a valid `traceparent`."""

MAX_TRACESTATE_CHARACTERS: Final = 512
"""Longer ones are dropped, as the specification allows (W3C Trace Context, 3.3.1.5)."""
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE: Final = re.compile(r"[\x20-\x7e\t]+")

SPAN_NAME: Final = "llm_request"
SERVICE_NAME: Final = "tokend"
PROTOCOL_VARIABLE: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def trace_headers_of(connection: HTTPConnection) -> TraceHeaders:
    """Return the trace context of a request; an invalid one counts as absent, as W3C demands."""
    parents = connection.headers.getlist("traceparent")
    if len(parents) != 1 or not _TRACEPARENT.fullmatch(parents[0].strip()):
        return {}
    headers = {"traceparent": parents[0].strip()}
    state = ",".join(connection.headers.getlist("tracestate"))
    if len(state) <= MAX_TRACESTATE_CHARACTERS and _TRACESTATE.fullmatch(state):
        headers["tracestate"] = state
    return headers


class RequestTracer:
    """Exports a span for each prompt of a finished request. Needs the extra `otel`.

    endpoint: of an OTLP collector, by gRPC unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is
    http/protobuf; the library reads its other variables (OTEL_TRACES_SAMPLER …) itself.
    model: as clients call it. A thread of the library exports spans in batches; those that a
    collector does not take are dropped.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", SERVICE_NAME)
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(span_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("tokend.api")
        self._propagator = TraceContextTextMapPropagator()
        self.model = model

    def record_request(self, request: EngineCoreRequest, stream: RequestStream, now: float) -> str:
        """Export the span of a prompt that has ended; return its trace id in hexadecimal.

        now: monotonic seconds.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode

        wall_time = time.time() - time.monotonic()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(request.trace_headers),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(stream.timeline.arrival + wall_time),
            attributes=self._attributes(request, stream, now),
        )
        for choice, event in stream.timeline.events:
            at = _nanoseconds(event.timestamp + wall_time)
            span.add_event(event.type.name.lower(), {"choice": choice}, at)
        if stream.error is not None:
            span.set_attribute("error.type", stream.error.type)
            span.set_status(Status(StatusCode.ERROR, stream.error.message))
        span.end(_nanoseconds(now + wall_time))
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Export the spans that wait, within the time limit of the exporter."""
        self._provider.shutdown()

    def _attributes(
        self, request: EngineCoreRequest, stream: RequestStream, now: float
    ) -> dict[str, Any]:
        params, timeline = request.sampling_params, stream.timeline
        last = stream.last_token_time
        attributes: dict[str, Any] = {
            "gen_ai.request.id": request.label,
            "gen_ai.request.n": request.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.model": self.model,
            "gen_ai.response.finish_reasons": [
                str(choice.finish_reason) if choice.finished else "abort"
                for choice in stream.choices
            ],
            "gen_ai.usage.num_sequences": len(stream.choices),
            "gen_ai.usage.prompt_tokens": len(stream.prompt_token_ids),
            "gen_ai.usage.completion_tokens": stream.num_completion_tokens,
            "gen_ai.usage.cached_tokens": stream.num_cached_tokens,
            "gen_ai.latency.e2e": now - timeline.arrival,
        }
        for name, start, end in (
            ("time_in_queue", timeline.queued, timeline.scheduled),
            ("time_to_first_token", timeline.arrival, timeline.first_token),
            ("time_in_model_prefill", timeline.scheduled, timeline.first_token),
            ("time_in_model_decode", timeline.first_token, last),
            ("time_in_model_inference", timeline.scheduled, last),
        ):
            if start is not None and end is not None:
                attributes[f"gen_ai.latency.{name}"] = end - start
        return attributes


def span_exporter(endpoint: str) -> Any:
    """Return a SpanExporter by the protocol of the environment, as vLLM chooses it."""
    if os.environ.get(PROTOCOL_VARIABLE) == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        return over_http.OTLPSpanExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

    return over_grpc.OTLPSpanExporter(endpoint=endpoint)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

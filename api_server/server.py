"""A front-end process from start to end: event loop, links, uvicorn.

Start reading at `_serve`. At the supervisor's command to shut down, or on SIGTERM, open streams get
an error event, connections close and the process ends within 2 s.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from api_server.app import create_app
from api_server.engine.adapters import ServedAdapters
from api_server.engine.async_link import SupervisorLink
from api_server.engine.engine_client import EngineClient, connect_engine
from api_server.engine.health import Health
from api_server.generation.app_state import AppState, ModelTexts
from api_server.generation.encoders.responses.peers import FrontEndPeers
from api_server.generation.encoders.responses.stored import StoredResponses
from api_server.generation.images import make_image_input
from api_server.generation.sampling import seeds
from api_server.generation.tracing import RequestTracer
from api_server.http.connection import MAX_BODY_BYTES, Reception
from api_server.http.http_protocol import LimitedHttpProtocol
from api_server.http.http_server import HttpServer
from api_server.http.request_log import RequestLog
from api_server.http.websocket_protocol import LimitedWebSocketProtocol
from api_server.live_view import LiveViewPublisher
from api_server.media.reader import MediaReader
from api_server.metrics.metric_sheet import Gauge, MetricSheet
from api_server.metrics.metrics import Metrics
from api_server.middleware import with_cors
from api_server.routes.system import daemon_version
from api_server.supervisor_commands import EngineSwitch, run_commands
from api_server.turns import return_freed_blocks
from proto.messages.engine_io import request_ids
from proto.messages.lifecycle import FrontEndReady, PhaseClock, ProcessBoot
from proto.runtime.process import REQUEST_LOOP_GC, freeze_heap
from proto.runtime.security import server_context
from proto.runtime.sockets import Link
from proto.runtime.stack_sampler import StackSampler
from proto.settings.config import FrontEndConfig
from proto.settings.lora_modules import LoRAAccess
from proto.settings.profiler_config import ProfilerConfig

logger = logging.getLogger("tokend.api")

GRACE_SECONDS = 1
"""Time for connections to send their last bytes."""
KEEP_ALIVE_SECONDS = 65
"""Longer than the idle time of common load balancers."""


def main(boot: ProcessBoot, supervisor: Link) -> None:
    """Serve until the supervisor stops this process."""
    clock = PhaseClock(boot.born_at)
    clock.end("imports")
    uvloop.run(_serve(boot, supervisor, clock))


async def _serve(boot: ProcessBoot, link: Link, clock: PhaseClock) -> None:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    supervisor = SupervisorLink(link, boot.index)
    links = [connect_engine(boot, epoch) for epoch in boot.engine_epochs]
    app_state = make_app_state(boot, links, supervisor)
    clock.end("tokenizer")
    app = create_app(app_state)
    admin_sockets = [socket.socket(fileno=descriptor) for descriptor in boot.admin_fds]
    server = make_server(app, app_state.config, app_state.metrics.connections, admin_sockets)
    freeze_heap(REQUEST_LOOP_GC)
    return_freed_blocks()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    commands = run_commands(supervisor, EngineSwitch(boot, app.state), stopped)
    sockets = [socket.socket(fileno=descriptor) for descriptor in boot.listen_fds]
    running = asyncio.create_task(commands)
    answering = asyncio.create_task(app_state.peers.run())
    serving = asyncio.create_task(server.serve(sockets=sockets))
    stopping = asyncio.create_task(stopped.wait())
    clock.end("routes")
    ready = asyncio.create_task(_report_ready(app_state, clock))
    waiting = {running, answering, serving, stopping, ready}
    while not stopping.done() and not serving.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    ready.cancel()
    app_state.client.close()
    server.should_exit = True
    await serving
    answering.cancel()
    app_state.peers.close()
    if (images := app.state.app_state.images) is not None:
        await images.reader.close()
    if app_state.tracer is not None:
        await asyncio.to_thread(app_state.tracer.close)


async def _report_ready(app_state: AppState, clock: PhaseClock) -> None:
    """Report to the supervisor when the engine is ready and the chat template is compiled."""
    await app_state.chat_template.compile()
    engine = await app_state.client.wait_ready()
    logger.info("ready: up to %d tokens a request", engine.max_model_len)
    clock.end("engine")
    if app_state.images is not None:
        app_state.images.reader.warm_up()
    app_state.supervisor.send(FrontEndReady(app_state.supervisor.index, clock.phases))


def make_app_state(
    boot: ProcessBoot,
    links: Sequence[Link],
    supervisor: SupervisorLink,
    media: MediaReader | None = None,
) -> AppState:
    """Return the application's state.

    links: to the engines, by index. media: loads images, in place of the reader of the model.
    """
    model, config = boot.model, boot.config
    name, *aliases = config.model.served_names(model.name)
    num_engines = len(links)
    sheet = make_metric_sheet(boot)
    metrics = Metrics(name, sheet, boot.incarnation, boot.num_hung, num_engines)
    live_view = LiveViewPublisher(
        name,
        daemon_version(),
        config.scheduler.max_num_seqs,
        access=LoRAAccess(config.lora.lora_access),
        num_engines=num_engines,
    )
    client = EngineClient(
        list(zip(links, boot.engine_epochs, strict=True)),
        request_ids(boot.index, boot.incarnation),
        metrics,
        config.scheduler.crashes_until_isolated,
        live_view,
        supervisor,
    )
    texts = ModelTexts.load(config, model)
    frontend = config.frontend
    max_bytes = frontend.max_stored_responses_mib << 20
    responses = StoredResponses(max_bytes, frontend.stored_response_seconds, time.monotonic)
    endpoint = config.frontend.otlp_traces_endpoint
    adapters = None
    if config.lora.enable_lora:
        adapters = ServedAdapters(client, config.lora, (name, *aliases))
        metrics.max_loras = config.lora.max_loras
    return AppState(
        model=texts.model,
        model_name=name,
        aliases=aliases,
        config=config.frontend,
        client=client,
        metrics=metrics,
        tokenizer=texts.tokenizer,
        chat_template=texts.chat_template,
        health=Health(client),
        epoch=boot.epoch,
        vocabulary=texts.vocabulary,
        settings=config,
        supervisor=supervisor,
        responses=responses,
        peers=FrontEndPeers(boot, responses),
        live_view=live_view,
        request_log=RequestLog(config.frontend),
        adapters=adapters,
        harmony=texts.harmony,
        generation_defaults=texts.generation_defaults,
        tracer=None if endpoint is None else RequestTracer(endpoint, name),
        sampler=_make_sampler(config.trace.parsed_profiler(), boot.index),
        images=make_image_input(boot, texts.model, texts.tokenizer, media),
        seeds=seeds(config.model.seed, boot.index),
    )


def _make_sampler(config: ProfilerConfig | None, index: int) -> StackSampler | None:
    if config is None or config.ignore_frontend:
        return None
    return StackSampler(config, f"api-{index}")


def make_metric_sheet(boot: ProcessBoot) -> MetricSheet:
    num_engines = len(boot.engine_epochs)
    if boot.metrics_fd is None:
        return MetricSheet.of_one(num_engines)
    num_rows = boot.config.frontend.api_server_count
    return MetricSheet.shared(boot.metrics_fd, boot.index, num_rows, num_engines)


def make_server(
    app: FastAPI,
    frontend: FrontEndConfig,
    connections: Gauge,
    admin_sockets: Sequence[socket.socket] = (),
) -> HttpServer:
    """Return the HTTP server of the application; run it with `serve(sockets=…)`.

    connections: open connections by front end. admin_sockets: listening sockets for operators.
    """
    reception = Reception(frontend.api_server_count, app.state.app_state.request_log)
    http: Any = partial(LimitedHttpProtocol, reception=reception)
    websockets: Any = partial(LimitedWebSocketProtocol, reception=reception)
    config = uvicorn.Config(
        with_cors(app, frontend),
        http=http,
        ws=websockets,
        ws_max_size=MAX_BODY_BYTES,
        ws_per_message_deflate=False,  # a compressed token is no shorter
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    config.load()
    config.ssl = None if frontend.ssl_certfile is None else server_context(frontend)
    shares_sockets = frontend.api_server_count > 1
    return HttpServer(
        config, connections, shares_sockets=shares_sockets, admin_sockets=admin_sockets
    )

"""What a front end does at the supervisor's command."""

import asyncio
import logging
from typing import Any

from api_server.lifecycle.async_link import SupervisorLink
from api_server.lifecycle.engine_switch import EngineSwitch
from proto.lifecycle import (
    AbortRequests,
    Alive,
    Drain,
    DrainProgress,
    DropEngine,
    HealthStatus,
    NewEngine,
    NextEngine,
    Ping,
    ProfileFrontEnds,
    Restarted,
    Shutdown,
    SwitchEngine,
)

logger = logging.getLogger("tokend.api")


async def run_commands(
    supervisor: SupervisorLink, engine_switch: EngineSwitch, stopped: asyncio.Event
) -> None:
    """Execute the supervisor's commands until cancelled.

    stopped: set by the command to shut down.
    """
    drain_reports: list[asyncio.Task[None]] = []
    while True:
        for command in await supervisor.receive():
            try:
                if isinstance(command, Shutdown):
                    stopped.set()
                elif isinstance(command, Drain):
                    _start_drain(engine_switch)
                    report = _report_drain_progress(supervisor, engine_switch)
                    drain_reports.append(asyncio.create_task(report))
                elif isinstance(command, Ping):
                    supervisor.send(Alive())
                else:
                    _run_command(command, engine_switch)
            except Exception:
                logger.exception("a command of the supervisor failed: %s", type(command).__name__)


def _run_command(command: Any, engine_switch: EngineSwitch) -> None:
    app_state = engine_switch.app_state
    if isinstance(command, AbortRequests):
        app_state.abort_streams(command.request_ids, command.owner)
    elif isinstance(command, ProfileFrontEnds):
        if app_state.sampler is not None:
            if command.wanted:
                app_state.sampler.start()
            else:
                app_state.sampler.stop()
    elif isinstance(command, Restarted):
        app_state.metrics.count_restart(command.role, command.hung)
        app_state.live_view.publish_restart(command.role, hung=command.hung)
    elif isinstance(command, HealthStatus):
        app_state.health.supervisor_status = command
    elif isinstance(command, NewEngine):
        engine_switch.replace_engine(command)
    elif isinstance(command, NextEngine):
        engine_switch.prepare(command)
    elif isinstance(command, SwitchEngine):
        engine_switch.switch(command.epoch)
    elif isinstance(command, DropEngine):
        engine_switch.drop(command.epoch)


def _start_drain(engine_switch: EngineSwitch) -> None:
    app_state = engine_switch.app_state
    app_state.health.start_drain()
    app_state.live_view.publish_notice("drain", "no more requests are accepted: the daemon exits")


async def _report_drain_progress(supervisor: SupervisorLink, engine_switch: EngineSwitch) -> None:
    """Report the number of requests in flight now, and again when it is 0."""
    number = engine_switch.num_in_flight
    if number:
        supervisor.send(DrainProgress(supervisor.index, number))
        await engine_switch.wait_until_idle()
    supervisor.send(DrainProgress(supervisor.index, 0))

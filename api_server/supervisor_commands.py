"""What a front end does at the supervisor's command: `run_commands`. A reload is an `EngineSwitch`:

    NextEngine ─▶ tokenizer, template, connection ─▶ NextReady
    SwitchEngine ─▶ new requests go to the next engine; running ones stay with the old one
                 ─▶ Switched ─ the last of them ends ─▶ OldEngineIdle

The application state is replaced as a whole. In an in-place reload one engine follows the other,
and running requests continue on the new one. If that serves another model, they finish on the old
one before NextReady, and new requests are refused until SwitchEngine.

Of several engines each is switched like this, the application state with the first one. If that has
another model, its switch is that of all engines.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from starlette.datastructures import State

from api_server.engine.async_link import SupervisorLink
from api_server.engine.engine_client import connect_engine
from api_server.engine.health import InFlightCounter
from api_server.generation.app_state import AppState, ModelTexts
from api_server.generation.images import make_image_input
from proto.errors import ModelError
from proto.messages.lifecycle import (
    AbortRequests,
    Alive,
    Drain,
    DrainProgress,
    DropEngine,
    ForgetImages,
    HealthStatus,
    NewEngine,
    NextEngine,
    NextReady,
    OldEngineIdle,
    Ping,
    ProcessBoot,
    ProfileFrontEnds,
    Restarted,
    Shutdown,
    Switched,
    SwitchEngine,
)
from proto.messages.prepared_model import PreparedModel
from proto.runtime.process import describe

logger = logging.getLogger("tokend.api")

UNUSED_CHECK_SECONDS: Final = 0.05
"""Time between two looks whether an old engine has requests."""


class EngineSwitch:
    """Replace the application state when the engine changes.

    state: of the application; its `app_state` answers new requests.
    """

    def __init__(self, boot: ProcessBoot, state: State) -> None:
        self._boot = boot
        self._state = state
        self._supervisor = self.app_state.supervisor
        self._preparing: dict[int, asyncio.Task[None]] = {}
        self._prepared: dict[int, AppState | None] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._old_states: dict[int, AppState] = {}
        self._in_flight: list[InFlightCounter] = [self.app_state.in_flight]
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def app_state(self) -> AppState:
        app_state: AppState = self._state.app_state
        return app_state

    @property
    def num_in_flight(self) -> int:
        return sum(counter.number for counter in self._in_flight)

    async def wait_until_idle(self) -> None:
        """Return when no request is in flight; call it when new ones are refused."""
        for counter in list(self._in_flight):
            await counter.wait_until_idle()

    def replace_engine(self, message: NewEngine) -> None:
        """Connect to the engine that replaces the current one, which has ended."""
        client, epoch, engine = self.app_state.client, message.epoch, message.engine
        cause = "died" if message.died else "is replaced by another one"
        link = connect_engine(self._boot, epoch)
        number = client.reconnect(link, epoch, engine, died=message.died)
        had = "1 request" if number == 1 else f"{number} requests"
        where = "at another engine" if client.connected else "when the next one is ready"
        logger.warning("engine %d %s: it had %s, to be continued %s", engine, cause, had, where)
        self._discard_profile()
        if engine == 0:
            self._state.app_state = replace(self.app_state, epoch=epoch)

    def _discard_profile(self) -> None:
        """Drop this process's part of a profile; the engine's ended with the engine."""
        if (sampler := self.app_state.sampler) is not None:
            sampler.discard()

    def prepare(self, message: NextEngine) -> None:
        """Prepare for the next engine; a task answers with NextReady, or with the failure."""
        task = asyncio.create_task(self._prepare(message))
        self._preparing[message.epoch] = task
        task.add_done_callback(lambda _: self._preparing.pop(message.epoch, None))

    def switch(self, epoch: int, engine: int = 0, epochs: Sequence[int] = ()) -> None:
        """Send new requests to the engine of this epoch (in place, they go there already).

        engine: its index. epochs: as in SwitchEngine.
        """
        old, client = self.app_state, self.app_state.client
        old.health.is_switching_model = False
        is_current = client.epochs[engine] == epoch
        if epoch not in self._prepared:
            if not is_current:  # otherwise this process was started for that engine
                logger.error("there is no engine of epoch %d to switch to", epoch)
            return
        prepared = self._prepared.pop(epoch)
        if prepared is not None:
            self._use(prepared)
        if is_current:
            self._close_images(old)
            return
        for index, other in enumerate(epochs):
            if index != engine:
                client.connect(connect_engine(self._boot, other), other, index)
        is_same_model = not epochs and (prepared is None or _is_same_model(old, prepared))
        left = client.switch(epochs or [epoch], is_same_model=is_same_model)
        self._discard_profile()
        if prepared is not None:
            self._in_flight = [counter for counter in self._in_flight if counter.number]
            self._in_flight.append(prepared.in_flight)
            self._old_states[left[engine if epochs else 0]] = old
        self._supervisor.send(Switched(self._boot.index, epoch))
        for old_epoch in left:
            leaving = asyncio.create_task(self._leave_engine(old_epoch, old))
            self._leaving[old_epoch] = leaving

    def _use(self, prepared: AppState) -> None:
        """Serve new requests with this application state."""
        old = self.app_state
        self._state.app_state = prepared
        if prepared.generation_defaults != old.generation_defaults:
            logger.info("sampling defaults: %s", str(prepared.generation_defaults) or "none")
        if prepared.model_name != old.model_name:
            logger.info("the model is %s now, in place of %s", prepared.model_name, old.model_name)
            prepared.metrics.model_name = prepared.model_name
            prepared.live_view.model = prepared.model_name
            if prepared.tracer is not None:
                prepared.tracer.model = prepared.model_name
        if prepared.adapters is not None:
            prepared.adapters.base_names = (prepared.model_name, *prepared.aliases)
        prepared.live_view.publish_notice("reload", "new requests go to the reloaded engine")

    def drop(self, epoch: int) -> None:
        """Forget an engine other than the current ones: the next engine, or an old one."""
        for tasks in (self._preparing, self._leaving):
            task = tasks.pop(epoch, None)
            if task is not None:
                task.cancel()
        client = self.app_state.client
        self.app_state.health.is_switching_model = False
        for unused in (self._prepared.pop(epoch, None), self._old_states.pop(epoch, None)):
            if unused is not None:
                self._close_images(unused)
        if epoch not in client.epochs:
            client.drop(epoch)

    async def _prepare(self, message: NextEngine) -> None:
        index, epoch = self._boot.index, message.epoch
        try:
            prepared = None
            if message.model is not None:
                prepared = await self._load(message.model, epoch)
            old = self.app_state
            if not message.in_place:
                link = connect_engine(self._boot, epoch)
                await old.client.connect(link, epoch, message.engine).wait_ready_or_closed()
            elif prepared is not None:
                await self._check_in_place(prepared)
                prepared = replace(prepared, in_flight=old.in_flight)
        except Exception as error:  # the current engine continues
            self._supervisor.send(NextReady(index, epoch, describe(error)))
            return
        self._prepared[epoch] = prepared
        self._supervisor.send(NextReady(index, epoch))

    async def _load(self, model: PreparedModel, epoch: int) -> AppState:
        """Return the application state with a model. Raises ModelError or ConfigError."""
        texts = await asyncio.to_thread(ModelTexts.load, self._boot.config, model)
        await texts.chat_template.compile()
        name, *aliases = self._boot.config.model.served_names(texts.model.name)
        return replace(
            self.app_state,
            model=texts.model,
            model_name=name,
            aliases=aliases,
            tokenizer=texts.tokenizer,
            chat_template=texts.chat_template,
            harmony=texts.harmony,
            images=make_image_input(self._boot, texts.model, texts.tokenizer),
            generation_defaults=texts.generation_defaults,
            vocabulary=texts.vocabulary,
            epoch=epoch,
            in_flight=InFlightCounter(),
        )

    async def _check_in_place(self, prepared: AppState) -> None:
        """Return when running requests can continue on the next engine, or have finished.

        Raises ModelError if they cannot.
        """
        if prepared.model.source != self.app_state.model.source:
            await self._finish_requests()
        elif not _is_same_model(prepared, self.app_state):
            raise ModelError(
                "the new version of the model has another tokenizer, so running requests "
                "cannot continue on it: reload side by side, or restart"
            )

    async def _finish_requests(self) -> None:
        """Refuse new requests and return when the open ones have ended.

        Raises ModelError if some last longer than a drain may.
        """
        health, seconds = self.app_state.health, self._boot.config.reliability.shutdown_timeout
        health.is_switching_model = True
        try:
            async with asyncio.timeout(seconds):
                await self.wait_until_idle()
        except TimeoutError:
            health.is_switching_model = False
            raise ModelError(
                f"{self.num_in_flight} requests still ran after {seconds:g} s "
                "(--shutdown-timeout), and both models do not run side by side"
            ) from None

    async def _leave_engine(self, epoch: int, old: AppState) -> None:
        """Disconnect from an old engine after its last request. old: when it was left."""
        client, in_flight = old.client, old.in_flight
        while client.is_needed(epoch, more_come=in_flight.number > 0):
            await asyncio.sleep(UNUSED_CHECK_SECONDS)
        client.drop(epoch)
        self._supervisor.send(OldEngineIdle(self._boot.index, epoch))
        if epoch in self._old_states:
            await in_flight.wait_until_idle()
            self._close_images(self._old_states.pop(epoch))
        del self._leaving[epoch]

    def _close_images(self, unused: AppState) -> None:
        """End the process for images of a model that takes no more requests."""
        if unused.images is not None:
            task = asyncio.create_task(unused.images.reader.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _is_same_model(some: AppState, other: AppState) -> bool:
    """Whether an engine with one may continue requests that were made for the other."""
    is_same = some.model.source == other.model.source
    return is_same and some.vocabulary == other.vocabulary


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
    elif isinstance(command, ForgetImages):
        if app_state.images is not None:
            app_state.images.reader.forget_unused()
    elif isinstance(command, Restarted):
        app_state.metrics.count_restart(command.role, command.hung)
        app_state.live_view.publish_restart(command.role, hung=command.hung, engine=command.engine)
        if command.role == "worker" and command.engine is not None:
            app_state.client.note_restarted_workers(command.engine)
    elif isinstance(command, HealthStatus):
        app_state.health.supervisor_status = command
        of_engines = [
            (reason.engine, reason) for reason in command.reasons if reason.engine is not None
        ]
        app_state.client.note_missing(
            {engine for engine, _ in of_engines},
            {engine for engine, reason in of_engines if reason.is_restarted},
            {engine for engine, reason in of_engines if reason.rests},
        )
    elif isinstance(command, NewEngine):
        engine_switch.replace_engine(command)
    elif isinstance(command, NextEngine):
        engine_switch.prepare(command)
    elif isinstance(command, SwitchEngine):
        engine_switch.switch(command.epoch, command.engine, command.epochs)
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

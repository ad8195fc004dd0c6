"""A reload as an API server sees it: connect to the next engine, switch, leave the old engine.

    NextEngine ─▶ tokenizer, template, connection ─▶ NextReady
    SwitchEngine ─▶ new requests go to the next engine; running ones stay with the old one
                 ─▶ Switched ─ the last of them ends ─▶ OldEngineIdle

The application state is replaced as a whole. In an in-place reload one engine follows the other,
and running requests continue on the new one.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from starlette.datastructures import State

from api_server.app_state import AppState, ModelTexts
from api_server.lifecycle.health import InFlightCounter
from proto.codec import Message
from proto.config import ModelConfig
from proto.errors import ModelError
from proto.lifecycle import NewEngine, NextEngine, NextReady, OldEngineIdle, Switched
from proto.process import describe
from proto.sockets import Link

logger = logging.getLogger("tokend.api")


class EngineSwitch:
    """Replace the application state when the engine changes.

    index: of this API server. state: of the application; its `app_state` answers new requests.
    config: of the model. connect: returns a link to the engine of an epoch. send: to the
    supervisor.
    """

    def __init__(
        self,
        index: int,
        state: State,
        config: ModelConfig,
        connect: Callable[[int], Link],
        send: Callable[[Message], None],
    ) -> None:
        self._index = index
        self._state = state
        self._config = config
        self._connect = connect
        self._send = send
        self._preparing: dict[int, asyncio.Task[None]] = {}
        self._coming: dict[int, AppState] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._vocabularies: dict[int, str] = {}
        self._in_flight: list[InFlightCounter] = [self.app_state.in_flight]

    @property
    def app_state(self) -> AppState:
        """The state that answers new requests."""
        app_state: AppState = self._state.app_state
        return app_state

    @property
    def num_in_flight(self) -> int:
        """HTTP requests in flight, whichever engine they use."""
        return sum(each.number for each in self._in_flight)

    async def wait_until_idle(self) -> None:
        """Return when no request is in flight; new ones must be refused by now."""
        for counter in list(self._in_flight):
            await counter.wait_until_idle()

    def replace_engine(self, message: NewEngine) -> None:
        """Connect to the engine that replaces the current one, which has ended."""
        client, epoch = self.app_state.client, message.epoch
        how = "died" if message.died else "makes room for another one"
        logger.warning("the engine %s: %d requests wait", how, client.num_open)
        client.reconnect(self._connect(epoch), epoch, died=message.died)
        self._state.app_state = replace(self.app_state, epoch=epoch)

    def prepare(self, message: NextEngine) -> None:
        """Prepare for the next engine and answer with NextReady, or with the reason against it."""
        task = asyncio.create_task(self._prepare(message))
        self._preparing[message.epoch] = task
        task.add_done_callback(lambda _: self._preparing.pop(message.epoch, None))

    def switch(self, epoch: int) -> None:
        """Send new requests to the engine of this epoch (in place, they go there already)."""
        coming = self._coming.pop(epoch, None)
        old, client = self.app_state, self.app_state.client
        if coming is None:
            if client.epoch != epoch:  # otherwise this process was started for that engine
                logger.error("there is no engine of epoch %d to switch to", epoch)
            return
        self._state.app_state = coming
        coming.live_view.notice("reload", "requests go to the engine that a reload has brought")
        if client.epoch == epoch:
            return
        client.switch(epoch)
        self._in_flight = [each for each in self._in_flight if each.number] + [coming.in_flight]
        self._send(Switched(self._index, epoch))
        self._vocabularies[old.epoch] = old.vocabulary
        self._leaving[old.epoch] = asyncio.create_task(self._leave_engine(old))

    def drop(self, epoch: int) -> None:
        """Forget an engine other than the current one: the next one, or one that was to be left."""
        for tasks in (self._preparing, self._leaving):
            task = tasks.pop(epoch, None)
            if task is not None:
                task.cancel()
        self._coming.pop(epoch, None)
        app_state = self.app_state
        vocabulary = self._vocabularies.pop(epoch, app_state.vocabulary)
        if epoch != app_state.client.epoch:
            app_state.client.drop(epoch, movable=vocabulary == app_state.vocabulary)

    async def _prepare(self, message: NextEngine) -> None:
        epoch = message.epoch
        try:
            texts = await asyncio.to_thread(ModelTexts.load, self._config, message.model)
            old = self.app_state
            if not message.in_place:
                await old.client.connect_next(self._connect(epoch), epoch).settled()
            elif texts.vocabulary != old.vocabulary:
                raise ModelError(
                    "the new version of the model has another tokenizer, and the requests under "
                    "way cannot go on with it: reload side by side, or restart"
                )
        except Exception as error:  # the current engine continues
            self._send(NextReady(self._index, epoch, describe(error)))
            return
        self._coming[epoch] = replace(
            old,
            model=message.model,
            tokenizer=texts.tokenizer,
            chat_template=texts.chat_template,
            vocabulary=texts.vocabulary,
            epoch=epoch,
            in_flight=old.in_flight if message.in_place else InFlightCounter(),
        )
        self._send(NextReady(self._index, epoch))

    async def _leave_engine(self, old: AppState) -> None:
        """Disconnect from the old engine after its last request."""
        await old.in_flight.wait_until_idle()
        del self._leaving[old.epoch], self._vocabularies[old.epoch]
        old.client.drop(old.epoch)
        self._send(OldEngineIdle(self._index, old.epoch))

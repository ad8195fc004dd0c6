"""A reload as a front end sees it: another engine is met, then asked, and the old one left.

    NextEngine ─▶ tokenizer, template, a link to it ─▶ NextReady
    SwitchEngine ─▶ who comes from now on goes there; who is inside stays with the old one
                 ─▶ Switched ─ the last of them leaves ─▶ EngineLeft

Owns which services requests get: they are replaced as a whole. In place there is one engine
after the other, and who is inside goes on with the new one.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from starlette.datastructures import State

from api_server.app_state import ModelTexts, Services
from api_server.health import Visitors
from proto.codec import Message
from proto.config import ModelConfig
from proto.errors import ModelError
from proto.lifecycle import EngineLeft, NewEngine, NextEngine, NextReady, Switched
from proto.process import describe
from proto.sockets import Link

logger = logging.getLogger("tokend.api")


class Changeover:
    """index: of this front end.

    state: of the application, whose `services` are those of now. config: of the model.
    meet: makes the link to the engine of an epoch. tell: sends to the supervisor.
    """

    def __init__(
        self,
        index: int,
        state: State,
        config: ModelConfig,
        meet: Callable[[int], Link],
        tell: Callable[[Message], None],
    ) -> None:
        self._index = index
        self._state = state
        self._config = config
        self._meet = meet
        self._tell = tell
        self._preparing: dict[int, asyncio.Task[None]] = {}
        self._coming: dict[int, Services] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._vocabularies: dict[int, str] = {}
        self._visitors: list[Visitors] = [self.services.visitors]

    @property
    def services(self) -> Services:
        """Those that a request gets that comes now."""
        services: Services = self._state.services
        return services

    @property
    def num_inside(self) -> int:
        """HTTP requests under way, at whatever engine."""
        return sum(each.number for each in self._visitors)

    async def all_gone(self) -> None:
        """Return when nobody is inside; the door must be closed."""
        for visitors in list(self._visitors):
            await visitors.gone()

    def replace_engine(self, message: NewEngine) -> None:
        """Another one takes the place of the engine of now, which is gone."""
        client, epoch = self.services.client, message.epoch
        how = "died" if message.died else "makes room for another one"
        logger.warning("the engine %s: %d requests wait", how, client.num_open)
        client.reconnect(self._meet(epoch), epoch, died=message.died)
        self._state.services = replace(self.services, epoch=epoch)

    def prepare(self, message: NextEngine) -> None:
        """Get ready for another engine; NextReady says when, or why not."""
        task = asyncio.create_task(self._prepare(message))
        self._preparing[message.epoch] = task
        task.add_done_callback(lambda _: self._preparing.pop(message.epoch, None))

    def switch(self, epoch: int) -> None:
        """From now on requests go to that engine; in place they do already."""
        coming = self._coming.pop(epoch, None)
        old, client = self.services, self.services.client
        if coming is None:
            if client.epoch != epoch:  # otherwise this process was born for that engine
                logger.error("there is no engine of epoch %d to switch to", epoch)
            return
        self._state.services = coming
        coming.feed.notice("reload", "requests go to the engine that a reload has brought")
        if client.epoch == epoch:
            return
        client.switch(epoch)
        self._visitors = [each for each in self._visitors if each.number] + [coming.visitors]
        self._tell(Switched(self._index, epoch))
        self._vocabularies[old.epoch] = old.vocabulary
        self._leaving[old.epoch] = asyncio.create_task(self._leave(old))

    def drop(self, epoch: int) -> None:
        """An engine beside that of now is gone: it was to come, or to be left."""
        for tasks in (self._preparing, self._leaving):
            task = tasks.pop(epoch, None)
            if task is not None:
                task.cancel()
        self._coming.pop(epoch, None)
        services = self.services
        vocabulary = self._vocabularies.pop(epoch, services.vocabulary)
        if epoch != services.client.epoch:
            services.client.drop(epoch, movable=vocabulary == services.vocabulary)

    async def _prepare(self, message: NextEngine) -> None:
        epoch = message.epoch
        try:
            texts = await asyncio.to_thread(ModelTexts.load, self._config, message.model)
            old = self.services
            if not message.in_place:
                await old.client.meet(self._meet(epoch), epoch).settled()
            elif texts.vocabulary != old.vocabulary:
                raise ModelError(
                    "the new version of the model has another tokenizer, and the requests under "
                    "way cannot go on with it: reload side by side, or restart"
                )
        except Exception as error:  # whatever is wrong, the engine of now goes on
            self._tell(NextReady(self._index, epoch, describe(error)))
            return
        self._coming[epoch] = replace(
            old,
            model=message.model,
            tokenizer=texts.tokenizer,
            chat_template=texts.chat_template,
            vocabulary=texts.vocabulary,
            epoch=epoch,
            visitors=old.visitors if message.in_place else Visitors(),
        )
        self._tell(NextReady(self._index, epoch))

    async def _leave(self, old: Services) -> None:
        """The last request of the old engine ends, and with it all ties."""
        await old.visitors.gone()
        del self._leaving[old.epoch], self._vocabularies[old.epoch]
        old.client.drop(old.epoch)
        self._tell(EngineLeft(self._index, old.epoch))

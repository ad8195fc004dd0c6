"""Rendering of chat templates within limits of time and memory.

A template comes with a model and is not trusted, so it is rendered in another process, which is
killed when it takes too long; `template_process.py` says what else is limited there. The process
stays between renderings: a short conversation takes 0.2 ms more than in the front end, and a
long one holds up no other request. It renders one conversation at a time; clients take turns.
"""

import asyncio
import os
from typing import Final

from api_server.task_process import TaskProcess
from api_server.text.chat_template import ChatTemplate, Conversation, TemplateFacts
from api_server.text.harmony import HarmonyTemplate
from api_server.text.template_process import (
    MAX_FRAME,
    MODULE,
    Rendered,
    RenderTask,
    pack,
    read_text,
    write_texts,
)
from api_server.turns import Turns
from proto.codec import MessageDecoder, encode, to_compact_json
from proto.errors import InvalidRequestError, ModelError, OverloadedError, TokendError

RENDER_SECONDS: Final = 5.0
"""Time limit of a rendering; thousands of messages take about 5 ms."""
COMPILE_SECONDS: Final = 20.0
"""For the first use of a template, with the start of its process on a busy machine."""
_CANCELLED_SECONDS: Final = 0.3
"""Time that a rendering may go on after its client has left; a new process would take about as long
to start."""
_DECODER: Final[MessageDecoder[Rendered]] = MessageDecoder(Rendered)


class TemplateRenderer:
    """Renders the model's chat template within a time limit.

    template: None for a base model, whose conversations are refused. model_name: for that error.
    limit: seconds for waiting and again for rendering. tool_template: for conversations with tools,
    if the model has one of its own. with_tools: the renderer of these, or this one.
    """

    def __init__(
        self,
        template: ChatTemplate | HarmonyTemplate | None,
        model_name: str = "",
        limit: float = RENDER_SECONDS,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        self._template = template
        self._model_name = model_name
        self._limit = limit
        self._endings: set[asyncio.Task[None]] = set()
        self.source = None if template is None else template.source
        self.facts = TemplateFacts() if template is None else template.facts
        self.with_tools = self
        if tool_template is not None:
            self.with_tools = TemplateRenderer(tool_template, model_name, limit)

    async def compile(self) -> None:
        """Compile the templates; raise ModelError if one cannot be used."""
        for renderer in {self, self.with_tools}:
            template = renderer._template
            if isinstance(template, ChatTemplate):
                await _PROCESS.turns.take()
                try:
                    async with asyncio.timeout(COMPILE_SECONDS):
                        await _PROCESS.render(template, None, COMPILE_SECONDS)
                except TimeoutError:
                    raise ModelError("compiling the chat template takes too long") from None
                except InvalidRequestError as error:
                    raise ModelError(error.message) from None
                finally:
                    _PROCESS.turns.give_back()

    async def render(self, conversation: Conversation) -> str:
        """Return the prompt.

        Raises TemplateError if the template refuses the messages, InvalidRequestError if it takes
        too long or too much memory, OverloadedError if earlier conversations use up the time or the
        machine cannot start a process, and ClientDisconnect.
        """
        if self._template is None:
            lack = (
                "no chat template"
                if self.with_tools is self
                else "a chat template only for requests with tools"
            )
            raise InvalidRequestError(
                f"the model {self._model_name} has {lack}; use /v1/completions", "messages"
            )
        try:
            async with asyncio.timeout(self._limit):
                await _PROCESS.turns.take()
        except TimeoutError:
            raise OverloadedError("other conversations keep the chat template busy") from None
        rendering = asyncio.create_task(self._render(self._template, conversation))
        try:
            done, _ = await asyncio.wait({rendering}, timeout=self._limit)
        except asyncio.CancelledError:
            self._end_turn(rendering, _CANCELLED_SECONDS)
            raise
        self._end_turn(rendering, 0.0)
        if done:
            return rendering.result()
        raise InvalidRequestError(
            f"the chat template takes longer than {self._limit:g} s for these messages", "messages"
        )

    async def _render(
        self, template: ChatTemplate | HarmonyTemplate, conversation: Conversation
    ) -> str:
        if isinstance(template, HarmonyTemplate):  # our own code
            return await asyncio.to_thread(template.render, conversation)
        return await _PROCESS.render(template, conversation, self._limit)

    def _end_turn(self, rendering: asyncio.Task[str], seconds: float) -> None:
        """End the turn when a rendering has ended, which is cancelled after `seconds`."""
        if rendering.done():
            _PROCESS.turns.give_back()
            return
        task = asyncio.create_task(self._end(rendering, seconds))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _end(self, rendering: asyncio.Task[str], seconds: float) -> None:
        try:
            await asyncio.wait({rendering}, timeout=seconds)
            rendering.cancel()
            await asyncio.wait({rendering})
            if not rendering.cancelled():
                rendering.exception()  # else asyncio would log that it was never retrieved
        finally:
            _PROCESS.turns.give_back()


class TemplateProcess:
    """The front end's side of the process that renders, one task at a time.

    It is started by a task. turns: of the tasks; `render` is for the caller that has the turn.
    """

    def __init__(self) -> None:
        self.turns = Turns(1)
        self._child = TaskProcess(MODULE, MAX_FRAME)

    async def render(
        self, template: ChatTemplate, conversation: Conversation | None, seconds: float
    ) -> str:
        """Return the prompt or raise the template's error.

        conversation: None to compile the template only. seconds: after which this call is
        cancelled; the process ends by itself soon after it if the front end has stopped.
        Does the task once more if something else has ended the process. Raises OverloadedError if
        none can be started.
        """
        for _ in range(2):
            if self._child.has_ended:
                await self._child.end()
                try:
                    self._child.start()
                except OSError:
                    raise OverloadedError("there is no process for the chat template") from None
            try:
                return await self._do_task(template, conversation, seconds)
            except TokendError:  # an answer
                raise
            except EOFError:
                await self._child.end()
            except BaseException:
                await self._child.end()
                raise
        raise InvalidRequestError("the chat template crashed on these messages", "messages")

    async def _do_task(
        self, template: ChatTemplate, conversation: Conversation | None, seconds: float
    ) -> str:
        """Do what `render` does; raises EOFError if the process ends."""
        texts = [
            template.source.encode(),
            to_compact_json(template.variables),
            b"" if conversation is None else pack(conversation),
        ]
        write_texts(self._child.file, texts)
        source, variables, rest = map(len, texts)
        task = RenderTask(source, variables, rest, seconds + 1.0)
        rendered = _DECODER.decode(await self._child.do_task(encode(task)))
        rendered.check()
        prompt = read_text(self._child.file, rendered.num_bytes)
        os.ftruncate(self._child.file, 0)
        return prompt.decode(errors="surrogatepass")


_PROCESS: Final = TemplateProcess()

"""Rendering of chat templates within a time limit.

A template comes with a model and is only half trusted, and rendering may take much longer than
its input suggests. So each rendering has a thread of its own while the event loop continues. At
the time limit an exception is raised inside the thread: a template is compiled to Python, which
stops at its next instruction, and the template's sandbox keeps every instruction short. One
conversation is rendered at a time; clients take turns.
"""

import asyncio
import contextlib
import ctypes
import threading
from typing import Final

from api_server.text.chat_template import ChatTemplate, Conversation, TemplateFacts
from api_server.text.harmony import HarmonyTemplate
from api_server.turns import Turns
from proto.errors import InvalidRequestError, OverloadedError

RENDER_SECONDS: Final = 5.0
"""A thousand times what thousands of messages take."""
_INTERRUPT_INTERVAL: Final = 0.05
"""Seconds between two exceptions raised in a thread; a destructor may swallow one."""


class _OvertimeError(BaseException):
    """Raised inside a rendering thread. No Exception, so that the template cannot catch it."""


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
        self._turns = Turns(1)
        self._interruptions: set[asyncio.Task[None]] = set()
        self.source = None if template is None else template.source
        self.facts = TemplateFacts() if template is None else template.facts
        self.with_tools = self
        if tool_template is not None:
            self.with_tools = TemplateRenderer(tool_template, model_name, limit)
            self.with_tools._turns = self._turns

    async def render(self, conversation: Conversation) -> str:
        """Return the prompt.

        Raises TemplateError if the template refuses the messages, InvalidRequestError if it takes
        too long, OverloadedError if earlier conversations use up the time or the threads, and
        ClientDisconnect.
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
                await self._turns.take()
        except TimeoutError:
            raise OverloadedError("other conversations keep the chat template busy") from None
        try:
            thread = _RenderThread(self._template, conversation)
        except RuntimeError:  # the machine cannot start another thread
            self._turns.give_back()
            raise OverloadedError("there is no thread for the chat template") from None
        try:
            done, _ = await asyncio.wait({thread.text}, timeout=self._limit)
        finally:
            self._end_turn(thread)
        if done:
            return thread.text.result()
        raise InvalidRequestError(
            f"the chat template takes longer than {self._limit:g} s for these messages", "messages"
        )

    def _end_turn(self, thread: "_RenderThread") -> None:
        """End the turn when the thread has ended; interrupt a thread that continues."""
        if thread.text.done():
            self._turns.give_back()
            return
        task = asyncio.create_task(self._interrupt(thread))
        self._interruptions.add(task)
        task.add_done_callback(self._interruptions.discard)

    async def _interrupt(self, thread: "_RenderThread") -> None:
        while thread.is_alive:
            thread.raise_overtime()
            await asyncio.sleep(_INTERRUPT_INTERVAL)
        self._turns.give_back()


class _RenderThread:
    """A thread that renders one conversation. text: the result, on the event loop."""

    def __init__(
        self, template: ChatTemplate | HarmonyTemplate, conversation: Conversation
    ) -> None:
        self._template = template
        self._conversation = conversation
        self._loop = asyncio.get_running_loop()
        self.text: asyncio.Future[str] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="render", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def raise_overtime(self) -> None:
        """Raise _OvertimeError in the thread; nothing happens if it has just ended."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_OvertimeError)
        )

    def _run(self) -> None:
        # RuntimeError: the event loop was closed before the thread ended.
        with contextlib.suppress(_OvertimeError, RuntimeError):
            text, error = "", None
            try:
                text = self._template.render(self._conversation)
            except Exception as raised:
                error = raised
            self._loop.call_soon_threadsafe(self._set_result, text, error)

    def _set_result(self, text: str, error: Exception | None) -> None:
        if self.text.cancelled():
            return
        if error is None:
            self.text.set_result(text)
        else:
            self.text.set_exception(error)

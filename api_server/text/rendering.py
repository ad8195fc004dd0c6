"""Rendering that ends: a template that takes too long is stopped in the middle.

A template comes with a model and is only half trusted, and what it does with a client's
messages may take far longer than they are long. So each render has a thread of its own,
the event loop goes on meanwhile, and at the time limit an exception is raised inside
that thread. Python code, which is what templates become, ends at its next instruction; the
operators that could make one instruction last are bounded by the template's environment.

Owns the thread and the turn: one text is rendered at a time.
"""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from api_server.text.chat_template import ChatTemplate, Conversation, TemplateFacts
from proto.errors import InvalidRequestError, OverloadedError

RENDER_SECONDS: Final = 5.0
"""A thousand times what thousands of messages take."""
_INSIST_SECONDS: Final = 0.05
"""Between two exceptions raised in a thread that goes on: a destructor may swallow one."""


class _OvertimeError(BaseException):
    """Raised inside a render. No Exception, so that nothing in a template's way catches it."""


class TemplateRenderer:
    """Renders a template within a limit, in seconds; so long again is waited for the turn."""

    def __init__(self, template: ChatTemplate, limit: float = RENDER_SECONDS) -> None:
        self._template = template
        self._limit = limit
        self._turn = asyncio.Lock()
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def source(self) -> str | None:
        """Of the template, None where there is none."""
        return self._template.source

    @property
    def facts(self) -> TemplateFacts:
        """What the template reads."""
        return self._template.facts

    async def render(self, conversation: Conversation) -> str:
        """The prompt; raises InvalidRequestError when the template refuses or takes too long.

        Raises OverloadedError when those before it take all the time or all the threads there are.
        """
        try:
            async with asyncio.timeout(self._limit):
                await self._turn.acquire()
        except TimeoutError:
            raise OverloadedError("other conversations keep the chat template busy") from None
        try:
            render = _Render(partial(self._template.render, conversation))
        except RuntimeError:  # the machine has no thread left
            self._turn.release()
            raise OverloadedError("there is no thread for the chat template") from None
        try:
            done, _ = await asyncio.wait({render.text}, timeout=self._limit)
        finally:
            self._give_turn_back(render)
        if done:
            return render.text.result()
        raise InvalidRequestError(
            f"the chat template takes longer than {self._limit:g} s for these messages", "messages"
        )

    def _give_turn_back(self, render: "_Render") -> None:
        """The next one has its turn when this one is really over."""
        if render.text.done():
            self._turn.release()
            return
        ending = asyncio.create_task(self._end(render))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _end(self, render: "_Render") -> None:
        while render.goes_on:
            render.interrupt()
            await asyncio.sleep(_INSIST_SECONDS)
        self._turn.release()


class _Render:
    """One text on a thread of its own. text: what comes of it, on the event loop."""

    def __init__(self, render: Callable[[], str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.text: asyncio.Future[str] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(render,), name="render", daemon=True
        )
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def interrupt(self) -> None:
        """Raise the exception where the thread is; nothing when it has just ended."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_OvertimeError)
        )

    def _run(self, render: Callable[[], str]) -> None:
        # The loop may be closed before an abandoned render ends.
        with contextlib.suppress(_OvertimeError, RuntimeError):
            text, error = "", None
            try:
                text = render()
            except Exception as raised:
                error = raised
            self._loop.call_soon_threadsafe(self._settle, text, error)

    def _settle(self, text: str, error: Exception | None) -> None:
        if self.text.cancelled():
            return
        if error is None:
            self.text.set_result(text)
        else:
            self.text.set_exception(error)

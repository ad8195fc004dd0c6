"""The process in which a front end has chat templates compiled and rendered.

    front end    ── RenderTask ──▶  python -m api_server.text.template_process
    (rendering)  ◀─── Rendered ───  (one task after the other, until its input ends)
          └──────── texts ────────┘
           a file in memory of both

A template comes with a model and is not trusted. A few characters of it make a single instruction
of Python run for hours or fill the memory (`center`, `%`, `sum`, regular expressions of filters),
and a thread of the front end cannot be ended from outside. Here each task has a limit of memory, in
proportion to its size, and one of processor time; the front end kills a process that takes longer
(`rendering.py`).
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, Literal

from api_server.text.chat_template import ChatTemplate, Conversation, TemplateError
from proto.codec import Message, MessageDecoder, encode, from_json
from proto.errors import InvalidRequestError, ModelError, shown
from proto.runtime.host_resources import process_limits

MODULE: Final = "api_server.text.template_process"
MIN_MEMORY: Final = 96 << 20
"""Bytes that any rendering may take, in addition to those of the process before it."""
MEMORY_FACTOR: Final = 24
"""Bytes that a rendering may take for each byte of its task. Of a text in JSON there are, at the
same time, the task, its strings (up to four bytes a character), the template's changed copies of
them, the parts of the prompt and the whole prompt."""
MIN_TEXT: Final = 8 << 20
TEXT_FACTOR: Final = 8
"""Bytes that a prompt may have, and further ones for each byte of its task."""
NUM_TEMPLATES: Final = 8
"""Compiled templates that are kept."""
MAX_MESSAGE: Final = 2_000
"""Characters of an error message."""
MAX_FRAME: Final = 1 << 16
_CONVERSATIONS: Final[MessageDecoder[Conversation]] = MessageDecoder(Conversation)


class RenderTask(Message, array_like=True, frozen=True):
    """A conversation to render, or a template only to compile.

    source_bytes, variables_bytes, conversation_bytes: lengths of the texts in the file: the
    template in UTF-8, its variables in JSON, the conversation of `pack`. Without a conversation the
    template is only compiled. seconds: of processor time.
    """

    source_bytes: int
    variables_bytes: int
    conversation_bytes: int
    seconds: float


class Rendered(Message, array_like=True, frozen=True):
    """That the prompt is in the file, in UTF-8, or why there is none.

    num_bytes: of the prompt. error: message; empty for none. kind: what to raise: TemplateError,
    InvalidRequestError or ModelError. param: of the request.
    """

    num_bytes: int = 0
    error: str = ""
    kind: Literal["template", "request", "model"] = "request"
    param: str | None = None

    def check(self) -> None:
        """Raise the error, if there is one."""
        if not self.error:
            return
        if self.kind == "model":
            raise ModelError(self.error)
        raise (TemplateError if self.kind == "template" else InvalidRequestError)(
            self.error, self.param
        )


def pack(conversation: Conversation) -> bytes:
    """Return a conversation as msgpack, or as JSON if it holds what msgpack cannot express.

    That are integers of more than 64 bits and halves of surrogate pairs; both have infinity.
    """
    try:
        return encode(conversation)  # type: ignore[arg-type]  # msgspec takes dataclasses
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(conversation, default=_fields).encode()


def _unpack(packed: bytes) -> Conversation:
    if packed.startswith(b"{"):
        return Conversation(**json.loads(packed))
    return _CONVERSATIONS.decode(packed)


def _fields(conversation: Conversation) -> dict[str, Any]:
    return {each.name: getattr(conversation, each.name) for each in fields(conversation)}


def write_texts(file: int, texts: Sequence[bytes]) -> None:
    """Replace the content of a file by these texts, one after the other."""
    os.ftruncate(file, 0)
    offset = 0
    for text in texts:
        rest = memoryview(text)
        while rest:
            written = os.pwrite(file, rest, offset)
            offset += written
            rest = rest[written:]


def read_text(file: int, num_bytes: int, offset: int = 0) -> bytes:
    """Return a part of a file; raises EOFError if it ends before."""
    pieces = []
    while num_bytes:
        piece = os.pread(file, num_bytes, offset)
        if not piece:
            raise EOFError
        pieces.append(piece)
        offset += len(piece)
        num_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class TemplateServer:
    """Renders the tasks of a socket, whose texts are in a file."""

    def __init__(self, channel: socket.socket, file: int) -> None:
        self._channel = channel
        self._file = file
        self._decoder: MessageDecoder[RenderTask] = MessageDecoder(RenderTask)
        self._templates: dict[tuple[bytes, bytes], ChatTemplate] = {}

    def run(self) -> None:
        """Render until the front end closes its end, or a task has used up its memory.

        After a failed allocation the process may be inconsistent, so it ends.
        """
        exhausted = False
        while not exhausted and (frame := self._channel.recv(MAX_FRAME)):
            task = self._decoder.decode(frame)
            size = task.source_bytes + task.variables_bytes + task.conversation_bytes
            try:
                with process_limits(task.seconds, MIN_MEMORY + MEMORY_FACTOR * size):
                    answer = self._answer(task, size)
            except MemoryError:
                exhausted = True
                message = "the chat template takes too much memory for these messages"
                answer = Rendered(error=message, param="messages")
            self._channel.send(encode(answer))

    def _answer(self, task: RenderTask, size: int) -> Rendered:
        try:
            template = self._template(task)
            if not task.conversation_bytes:
                return Rendered()
            offset = task.source_bytes + task.variables_bytes
            packed = read_text(self._file, task.conversation_bytes, offset)
            conversation = _unpack(packed)
            del packed
            text = template.render(conversation).encode(errors="surrogatepass")
        except InvalidRequestError as error:
            kind: Literal["template", "request"] = "request"
            if isinstance(error, TemplateError):
                kind = "template"
            return Rendered(error=_readable(error.message), kind=kind, param=error.param)
        except ModelError as error:
            return Rendered(error=_readable(str(error)), kind="model")
        except MemoryError:
            raise
        except Exception as error:  # such as a conversation that is nested too deeply
            return Rendered(error=_readable(f"chat template: {shown(error)}"), param="messages")
        most = MIN_TEXT + TEXT_FACTOR * size
        if len(text) > most:
            message = (
                f"the chat template turns these messages into {len(text)} bytes, "
                f"more than the limit of {most}"
            )
            return Rendered(error=message, param="messages")
        write_texts(self._file, [text])
        return Rendered(len(text))

    def _template(self, task: RenderTask) -> ChatTemplate:
        source = read_text(self._file, task.source_bytes)
        variables = read_text(self._file, task.variables_bytes, task.source_bytes)
        key = (source, variables)
        if key not in self._templates:
            if len(self._templates) == NUM_TEMPLATES:
                self._templates.clear()
            template = ChatTemplate(source.decode(), from_json(variables, dict))
            template.compile()
            self._templates[key] = template
        return self._templates[key]


def _readable(message: str) -> str:
    """Return an error message that fits into a frame."""
    return message[:MAX_MESSAGE].encode(errors="backslashreplace").decode()


def main() -> None:
    """Run the process; its standard input is the front end's socket, its argument the file."""
    with contextlib.suppress(ConnectionError), socket.socket(fileno=os.dup(0)) as channel:
        TemplateServer(channel, int(sys.argv[1])).run()


if __name__ == "__main__":
    main()

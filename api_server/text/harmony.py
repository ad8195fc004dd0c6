"""OpenAI's harmony format: the library's encoding, and prompts of gpt-oss models.

    <|start|>system<|message|>You are ChatGPT, …  Reasoning: medium  # Valid channels: …<|end|>
    <|start|>developer<|message|># Instructions …  # Tools … namespace functions {…}<|end|>
    <|start|>user<|message|>Is it cold in Paris?<|end|>
    <|start|>assistant<|channel|>analysis<|message|>I should look.<|end|>
    <|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>
      {"city": "Paris"}<|call|>
    <|start|>functions.weather to=assistant<|channel|>commentary<|message|>3 degrees<|end|>
    <|start|>assistant

`HarmonyTemplate` renders these with `openai-harmony` and takes the place of the model's Jinja
template, which refuses or leaves out parts of usual conversations: content beside reasoning and a
call, tools without a description, all but the first of several calls, later system messages.
`api_server/parsers/harmony.py` reads the model's answers.

The library reads its vocabulary from a file with a pinned hash. `load_encoding` writes that file
from the model's own tokenizer, so that nothing is downloaded.
"""

import base64
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from api_server.text.chat_template import (
    CONTINUE_FIELD,
    Conversation,
    TemplateFacts,
    arguments_text,
)
from proto.byte_level import LETTER_BYTES
from proto.errors import InvalidRequestError, ModelError, shown

FUNCTIONS: Final = "functions."
"""Prefix of a recipient that is a tool of the request."""
EFFORTS: Final = ("low", "medium", "high")
NUM_RANKS: Final = 199_998
"""Tokens of the vocabulary o200k that are not special."""
VOCABULARY_FOLDER: Final = "TIKTOKEN_ENCODINGS_BASE"
"""Environment variable of the library: a folder with the vocabulary's file."""
_VOCABULARY_FILE: Final = "o200k_base.tiktoken"
_ENVIRONMENT_LOCK: Final = threading.Lock()

Json = Mapping[str, Any]


class HarmonyEncoding:
    """The encoding of `openai-harmony`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.called_tool = lru_cache(maxsize=1024)(self._called_tool)

    def _called_tool(self, header: str) -> str | None:
        """Return the function that a message calls by its header, None if it calls none.

        A header stands between `<|start|>assistant` and `<|message|>`; a malformed one calls none.
        The library takes a millisecond or more, and few headers differ, so results are cached.
        """
        from openai_harmony import HarmonyError, Role, StreamableParser

        parser = StreamableParser(self.inner, Role.ASSISTANT)
        try:
            for token_id in self.inner.encode(f"{header}<|message|>", allowed_special="all"):
                parser.process(token_id)
        except HarmonyError:
            return None
        recipient = parser.current_recipient or ""
        return recipient.removeprefix(FUNCTIONS) if recipient.startswith(FUNCTIONS) else None

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool) -> str:
        """Return the text of messages of the library; raise HarmonyError if they are invalid."""
        import openai_harmony

        conversation = openai_harmony.Conversation.from_messages(messages)
        config = openai_harmony.RenderConversationConfig(auto_drop_analysis=False)
        if add_generation_prompt:
            ids = self.inner.render_conversation_for_completion(
                conversation, openai_harmony.Role.ASSISTANT, config
            )
        else:
            ids = self.inner.render_conversation(conversation, config)
        return str(self.inner.decode(ids))


def load_encoding(tokenizer_json: Path) -> HarmonyEncoding:
    """Return the library's encoding, from a model's tokenizer.

    A folder in TIKTOKEN_ENCODINGS_BASE takes precedence: for a model with harmony's special tokens
    and another vocabulary. Raises ModelError if the vocabulary is not the one of the library.
    """
    from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

    with _ENVIRONMENT_LOCK, tempfile.TemporaryDirectory(prefix="tokend-harmony-") as folder:
        given = os.environ.get(VOCABULARY_FOLDER)
        if given is None:
            ranks = Tokenizer.from_file(str(tokenizer_json)).get_vocab(with_added_tokens=False)
            Path(folder, _VOCABULARY_FILE).write_bytes(vocabulary_file(ranks))
            os.environ[VOCABULARY_FOLDER] = folder
        try:
            return HarmonyEncoding(load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS))
        except HarmonyError as error:
            raise ModelError(
                f"{given or tokenizer_json}: not the vocabulary o200k, which the harmony format "
                f"needs ({error}). Point {VOCABULARY_FOLDER} to a folder with {_VOCABULARY_FILE}, "
                "or choose another format by --reasoning-parser"
            ) from None
        finally:
            if given is None:
                del os.environ[VOCABULARY_FOLDER]


def vocabulary_file(ranks: Mapping[str, int]) -> bytes:
    """Return a vocabulary in tiktoken's format, a line `base64(token) rank` for each token.

    ranks: byte-level token → id; tokens from NUM_RANKS on are special and left out.
    """
    lines = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if rank >= NUM_RANKS:
            break
        try:
            raw = bytes(LETTER_BYTES[character] for character in token)
        except KeyError:  # no byte-level vocabulary: the library reports another hash
            raw = token.encode()
        lines.append(f"{base64.b64encode(raw).decode()} {rank}\n")
    return "".join(lines).encode()


_VARIABLES: Final = ("model_identity", "knowledge_cutoff", "conversation_start_date")
"""Variables of the system message, besides `reasoning_effort`."""
_END: Final = "<|end|>"


class HarmonyTemplate:
    """Renders conversations in the harmony format; has the interface of a `ChatTemplate`.

    source: of the model's own template, which is not used.
    """

    facts = TemplateFacts(names=frozenset({"tools", "reasoning_effort", *_VARIABLES}))

    def __init__(self, encoding: HarmonyEncoding, source: str | None) -> None:
        self._encoding = encoding
        self.source = source

    def render(self, conversation: Conversation) -> str:
        """Return the prompt; raise InvalidRequestError for messages that it cannot express."""
        from openai_harmony import HarmonyError

        messages = [_system_message(conversation.variables), *_messages(conversation)]
        try:
            text = self._encoding.render(
                messages, add_generation_prompt=conversation.add_generation_prompt
            )
        except HarmonyError as error:
            raise InvalidRequestError(f"harmony: {shown(error)}", "messages") from None
        if not conversation.continue_final_message:
            return text
        last = conversation.messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls") or not last.get("content"):
            raise InvalidRequestError(
                "only the text of an assistant's message can be continued", CONTINUE_FIELD
            )
        return text.removesuffix(_END)


def _system_message(variables: Json) -> Any:
    """Return the message with the model's identity, the date, the effort and the channels."""
    from openai_harmony import Message, ReasoningEffort, Role, SystemContent

    for name in _VARIABLES:
        if not isinstance(variables.get(name, ""), str):
            raise InvalidRequestError(f"{name} must be a string", "chat_template_kwargs")
    effort = variables.get("reasoning_effort", "medium")
    if effort == "none":  # the grammar of the answer leaves reasoning out
        effort = "low"
    if effort not in EFFORTS:
        raise InvalidRequestError(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}", "chat_template_kwargs"
        )
    content = SystemContent(
        reasoning_effort=ReasoningEffort[effort.upper()],
        conversation_start_date=datetime.now().strftime("%Y-%m-%d"),
    )
    given = {name: variables[name] for name in _VARIABLES if name in variables}
    content = content.model_copy(update=given)
    return Message.from_role_and_content(Role.SYSTEM, content)


def _messages(conversation: Conversation) -> list[Any]:
    """Return the messages of the library, without the system message.

    Reasoning of earlier answers is left out: it is kept only after the last message without a call.
    """
    from openai_harmony import Message, Role

    given = conversation.messages
    num_leading = next(
        (index for index, message in enumerate(given) if not _is_instruction(message)), len(given)
    )
    converted = []
    if num_leading or conversation.tools:
        instructions = "\n\n".join(message["content"] for message in given[:num_leading])
        converted.append(_developer_message(instructions, conversation.tools or ()))
    finals = [index for index, message in enumerate(given) if _is_final(message)]
    last_final = max(finals, default=-1)
    calls = _Calls(given)
    for index, message in enumerate(given[num_leading:], start=num_leading):
        role, content = message["role"], message.get("content") or ""
        if _is_instruction(message):
            converted.append(_developer_message(content, ()))
        elif role == "user":
            converted.append(Message.from_role_and_content(Role.USER, content))
        elif role == "assistant":
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            if reasoning and index > last_final:
                converted.append(_assistant_message(reasoning, "analysis"))
            if content:
                channel = "commentary" if message.get("tool_calls") else "final"
                converted.append(_assistant_message(content, channel))
            converted += calls.convert_calls(index)
        elif role == "tool":
            converted += calls.convert_result(index)
        else:
            raise InvalidRequestError(
                f"messages[{index}].role: the harmony format has no role {shown(role)}", "messages"
            )
    return converted


class _Calls:
    """Converts the calls of a conversation and their results.

    A result stands after its call, as the model learnt it, also if a message has several calls:

        assistant  calls a and b            to=functions.a … <|call|>   functions.a …
        tool       result of a         ─▶   to=functions.b … <|call|>   functions.b …
        tool       result of b
    """

    def __init__(self, messages: Sequence[Json]) -> None:
        self._messages = messages
        self._names: dict[str | None, str] = {}  # id of a call → recipient; None: the last call
        self._placed: set[int] = set()  # indices of results that stand after their calls

    def convert_calls(self, index: int) -> list[Any]:
        """Return the calls of a message, each with its results if they follow the message."""
        converted = []
        for call in self._messages[index].get("tool_calls") or ():
            call_id, function = call.get("id"), call["function"]
            recipient = FUNCTIONS + function["name"]
            self._names[call_id] = self._names[None] = recipient
            arguments = arguments_text(function["arguments"])
            message = _assistant_message(arguments, "commentary").with_recipient(recipient)
            converted.append(message.with_content_type("<|constrain|>json"))
            following = index + 1
            while call_id is not None and following < len(self._messages):
                result = self._messages[following]
                if result["role"] != "tool":
                    break
                if result.get("tool_call_id") == call_id:
                    converted += self.convert_result(following)
                    self._placed.add(following)
                following += 1
        return converted

    def convert_result(self, index: int) -> list[Any]:
        """Return the result of a call; nothing if it stands after its call already."""
        from openai_harmony import Author, Message, Role

        if index in self._placed:
            return []
        message = self._messages[index]
        recipient = self._names.get(message.get("tool_call_id"))
        if recipient is None:
            raise InvalidRequestError(
                f"messages[{index}] is the result of a call that is not in the conversation",
                "messages",
            )
        author = Author(role=Role.TOOL, name=recipient)
        result = Message.from_author_and_content(author, message.get("content") or "")
        return [result.with_recipient("assistant").with_channel("commentary")]


def _is_instruction(message: Json) -> bool:
    return message["role"] in ("system", "developer")


def _is_final(message: Json) -> bool:
    """Return whether a message ended an answer: it has content and calls nothing."""
    has_text = bool(message.get("content"))
    return message["role"] == "assistant" and has_text and not message.get("tool_calls")


def _assistant_message(text: str, channel: str) -> Any:
    from openai_harmony import Message, Role

    return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)


def _developer_message(instructions: str, tools: Sequence[Json]) -> Any:
    from openai_harmony import DeveloperContent, Message, Role, ToolDescription

    content = DeveloperContent(instructions=instructions or None)
    if tools:
        functions = [tool["function"] for tool in tools]
        content = content.with_function_tools(
            [
                ToolDescription.new(
                    function["name"],
                    function.get("description", ""),
                    # without properties the library would write an empty object type
                    function["parameters"] if function["parameters"].get("properties") else None,
                )
                for function in functions
            ]
        )
    return Message.from_role_and_content(Role.DEVELOPER, content)

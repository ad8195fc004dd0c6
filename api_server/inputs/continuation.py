"""A prompt that ends in the middle of its last message, so that the answer goes on with it.

A template closes every message. Where the last one's text ends is found by a mark behind it:

    messages   … {"role": "assistant", "content": "Once upon CONTINUED "}
    rendered   <|im_start|>assistant\nOnce upon CONTINUED <|im_end|>\n
    prompt     <|im_start|>assistant\nOnce upon

Owns the mark. The same as `continue_final_message` of `transformers`, but that the mark is
another one for each request: a text of the client's cannot hold it.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

from proto.errors import InvalidRequestError

FIELD: Final = "continue_final_message"


def continued(
    messages: Sequence[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> str:
    """What `render` makes of the messages, up to the end of the last one's text.

    A template that trims messages drops the last blanks of that too. Raises InvalidRequestError
    where there is no text to go on with, or the template leaves out some of it.
    """
    mark = f"CONTINUED-{secrets.token_hex(16)} "
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        said = content
        last["content"] = content + mark
    elif isinstance(content, list) and any("text" in part for part in content):
        place = max(place for place, part in enumerate(content) if "text" in part)
        parts = [dict(part) for part in content]
        said = parts[place]["text"]
        parts[place]["text"] = said + mark
        last["content"] = parts
    else:
        raise InvalidRequestError("the last message has no text to go on with", FIELD)
    text = render([*messages[:-1], last])
    end = text.rfind(mark.strip())
    if end < 0 or said.strip() not in text:
        raise InvalidRequestError("the chat template leaves out some of the last message", FIELD)
    return text[:end] if text.startswith(mark, end) else text[:end].rstrip()

"""Images in messages: the parts that clients send, in the form of chat completions.

    chat        {"type": "image_url", "image_url": {"url", "detail"}, "uuid"}    or "image_url": "…"
    responses   {"type": "input_image", "image_url": "…", "detail"}
    messages    {"type": "image", "source": {"type": "base64", "media_type", "data"}}    or "url"

The other APIs translate theirs into the first.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from api_server.protocol.fields import PART_NEUTRAL, IgnoredFields, given_fields, is_encodable
from proto.errors import InvalidRequestError, shown

Json = dict[str, Any]
DETAILS: Final = ("auto", "low", "high")
MAX_UUID_CHARACTERS: Final = 256
_PART: Final = "messages.content."
_MEDIA_TYPE: Final = re.compile(r"image/[a-z0-9.+-]{1,64}")


def read_image_part(part: Json, ignored: IgnoredFields) -> Json:
    """Return url, detail and uuid of an image_url part of a chat.

    url: None if the client names an image that it has sent before by its uuid alone.
    Raises ValueError, whose message begins with the field.
    """
    fields = _given(part, ("type", "image_url", "uuid"), _PART, ignored)
    image, uuid = fields.get("image_url"), fields.get("uuid")
    if isinstance(image, str):
        image = {"url": image}
    elif image is None and uuid is not None:
        image = {}
    elif not isinstance(image, dict):
        raise ValueError(".image_url must be an object with a url, or a string")
    image = _given(image, ("url", "detail"), f"{_PART}image_url.", ignored)
    url, detail = image.get("url"), image.get("detail", DETAILS[0])
    if url is None and uuid is None:
        raise ValueError(".image_url.url is missing")
    if url is not None and not (isinstance(url, str) and url):
        raise ValueError(".image_url.url must be a URL")
    if detail not in DETAILS:
        raise ValueError(f".image_url.detail must be one of {', '.join(DETAILS)}")
    if uuid is not None and not _is_uuid(uuid):
        raise ValueError(f".uuid must be a text of 1 to {MAX_UUID_CHARACTERS} characters")
    return {"type": "image_url", "url": url, "detail": detail, "uuid": uuid}


def _given(
    fields: Mapping[str, Any], known: Sequence[str], where: str, ignored: IgnoredFields
) -> Json:
    try:
        return given_fields(fields, known, PART_NEUTRAL, ignored, where)
    except InvalidRequestError as error:
        raise ValueError(f".{error.message.removeprefix(_PART)}") from None


def _is_uuid(value: Any) -> bool:
    is_text = isinstance(value, str) and 0 < len(value) <= MAX_UUID_CHARACTERS
    return is_text and is_encodable(value)


def read_input_image(part: Json, where: str) -> Json:
    """Return an input_image part of /v1/responses as a part of a chat.

    where: its path. Raises InvalidRequestError.
    """
    url, detail = part.get("image_url"), part.get("detail")
    if url is None and part.get("file_id") is not None:
        raise InvalidRequestError(
            f"{where}.file_id: this server keeps no files; send the image as image_url", "input"
        )
    if not isinstance(url, str) or not url:
        raise InvalidRequestError(f"{where}.image_url must be a URL", "input")
    if detail is not None and detail not in DETAILS:
        raise InvalidRequestError(f"{where}.detail must be one of {', '.join(DETAILS)}", "input")
    return _image_part(url, detail)


def read_image_block(block: Json, where: str) -> Json:
    """Return an image block of /v1/messages as a part of a chat.

    where: its path. Raises InvalidRequestError.
    """
    source = block.get("source")
    if not isinstance(source, dict):
        raise _invalid(f"{where}.source", "must be an object with a type")
    kind = source.get("type")
    if kind == "base64":
        media_type, data = source.get("media_type"), source.get("data")
        if not (isinstance(media_type, str) and _MEDIA_TYPE.fullmatch(media_type)):
            raise _invalid(f"{where}.source.media_type", "must be a type such as image/png")
        if not isinstance(data, str) or not data:
            raise _invalid(f"{where}.source.data", "must be a string in base64")
        return _image_part(f"data:{media_type};base64,{data}")
    if kind == "url":
        url = source.get("url")
        if not isinstance(url, str) or not url:
            raise _invalid(f"{where}.source.url", "must be a URL")
        return _image_part(url)
    if kind == "file":
        raise _invalid(f"{where}.source", "this server keeps no files; send base64 or a url")
    raise _invalid(f"{where}.source", f"must have the type base64 or url, not {shown(kind)}")


def _image_part(url: str, detail: str | None = None) -> Json:
    return {"type": "image_url", "image_url": {"url": url, "detail": detail or DETAILS[0]}}


def joined_content(pieces: Sequence[str | Json]) -> str | list[Json]:
    """Return the content of a message: texts joined by line breaks, with image parts between them.

    pieces: texts, of which empty ones are left out, and image parts. A text alone stays a text.
    """
    if all(isinstance(piece, str) for piece in pieces):
        return "\n".join(piece for piece in pieces if isinstance(piece, str) and piece)
    parts: list[Json] = []
    for kind, group in groupby(pieces, type):
        if kind is not str:
            parts += group  # type: ignore[arg-type]
        elif text := "\n".join(filter(None, group)):  # type: ignore[arg-type]
            parts.append({"type": "text", "text": text})
    return parts


def image_paths(
    messages: Sequence[Mapping[str, Any]], places: Sequence[str]
) -> dict[tuple[int, int], str]:
    """Return the place of each image in the client's request, by its message and part in a chat.

    places: of all images, in their order.
    """
    found = (
        (index, number)
        for index, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for number, part in enumerate(message["content"])
        if part["type"] == "image_url"
    )
    return dict(zip(found, places, strict=True))


def _invalid(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {what}", where)

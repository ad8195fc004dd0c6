"""What is asked of a server beside the load: whether it is up, and what it serves.

With the standard library's client: it is asked while a server starts on the same cores, and a
client that reads certificates first would be part of what is measured.
"""

import http.client
import json
from typing import Final
from urllib.parse import urlsplit

from proto.errors import TokendError

_ANSWER_SECONDS: Final = 30.0


def get(url: str, api_key: str = "", timeout: float = _ANSWER_SECONDS) -> tuple[int, bytes]:
    """(status, body); raises OSError or HTTPException when there is no answer."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.netloc.rpartition("@")[2], timeout=timeout)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection.request("GET", parts.path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def is_up(url: str, timeout: float) -> bool:
    """Whether the answer is a 200."""
    try:
        return get(url, timeout=timeout)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def first_model(url: str, api_key: str = "") -> str:
    """What the server says it serves; raises TokendError."""
    try:
        _, body = get(f"{url}/v1/models", api_key)
        return str(json.loads(body)["data"][0]["id"])
    except (
        *(OSError, http.client.HTTPException),
        *(ValueError, KeyError, IndexError, TypeError),
    ) as error:
        raise TokendError(f"{url}/v1/models does not name a model: {error!r}") from None

"""HTTP/1.1 on one connection: uvicorn's protocol with a limit on what stands before the body.

Owns that limit and the answer to who exceeds it, and lets a response that has begun say
that it is the last one of its connection. Knows nothing of routes.
"""

from functools import partial
from typing import Any, Final

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api_server.errors import HeadersTooLargeError, error_response

MAX_HEADER_BYTES: Final = 64 << 10
"""Most bytes of the URL and all header lines of a request together."""

_LAST: Final = "tokend.last_response"
"""Name of the ASGI extension: a function without arguments."""

LINGER_SECONDS: Final = 1.0
"""A refused client may still be sending; closing at once would reset what it should read."""


def close_after_response(scope: Scope) -> None:
    """Close the connection of this request when its response is complete.

    For a stream that fails after its headers, which could not say so. Nothing where the
    server has no such extension.
    """
    scope.get("extensions", {}).get(_LAST, _nothing)()


class LimitedHttpProtocol(HttpToolsProtocol):
    """Answers 431 and closes when a request's headers are too large.

    Two counts: `_parsed` is exact, over what the parser has handed out; `_raw` is over
    what came while one endless header keeps the parser silent.
    """

    _refused = False
    _in_headers = False
    _in_body = False
    _begun = 0
    _parsed = 0
    _raw = 0

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        all_of_one = 0 if self._in_headers else 1
        in_body, self._begun = self._in_body, 0
        super().data_received(data)
        if in_body or self._begun != all_of_one:
            return  # the data began with the end of an earlier request
        if self._in_headers and not self._refused:
            self._raw += len(data)
            if self._raw > MAX_HEADER_BYTES:
                self._refuse()

    def on_message_begin(self) -> None:
        self._in_headers, self._parsed, self._raw = True, 0, 0
        self._begun += 1
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + len(b": \r\n"))

    def on_headers_complete(self) -> None:
        self._in_headers, self._in_body = False, True
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {_LAST: partial(setattr, self.cycle, "keep_alive", False)}

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser stops, also when `_count` stopped it."""
        if self._parsed > MAX_HEADER_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _count(self, number: int) -> None:
        self._parsed += number
        if self._parsed > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")

    def _refuse(self) -> None:
        message = f"URL and headers are larger than {MAX_HEADER_BYTES} bytes together"
        response = error_response(HeadersTooLargeError(message))
        lines = [b"HTTP/1.1 431 Request Header Fields Too Large"]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        if self.transport.can_write_eof():  # TLS has no half of a connection to close
            self.transport.write_eof()
        self._refused = True
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _nothing() -> None:
    """There is no connection of ours."""

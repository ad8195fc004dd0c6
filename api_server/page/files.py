"""The files of the page, as they are sent to browsers.

Owns which files there are, under which paths, and what a browser is allowed to do with them.
Knows nothing of requests. There is nothing secret in them, so they need no key.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ASSETS: Final = Path(__file__).parent / "assets"
INDEX: Final = "index.html"
FOLDER: Final = "/page/"

_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing comes from elsewhere, nothing goes elsewhere, and no other page may frame this one."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. path: at the server. tag: changes with the content."""

    path: str
    content: bytes
    media_type: str
    tag: str

    @property
    def headers(self) -> dict[str, str]:
        """A browser asks each time whether it has changed: after an update it has."""
        return {
            "content-type": self.media_type,
            "etag": self.tag,
            "cache-control": "no-cache",
            "content-security-policy": _POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
        }


def page_files() -> list[PageFile]:
    """All of them, read once; the first page is at `/`, whatever it needs below `/page/`."""
    return [_read(path) for path in sorted(ASSETS.iterdir()) if path.suffix in _MEDIA_TYPES]


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(
        path="/" if path.name == INDEX else FOLDER + path.name,
        content=content,
        media_type=_MEDIA_TYPES[path.suffix],
        tag=f'"{hashlib.sha256(content).hexdigest()[:20]}"',
    )

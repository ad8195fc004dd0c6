"""The files of the pages: their paths, their content and their security headers.

They contain no secrets, so their routes need no key.
"""

import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ASSETS: Final = Path(__file__).parent / "assets"
PAGES: Final = {"index.html": "/", "docs.html": "/docs"}
"""File → path of each document; the other files are what these load."""
FOLDER: Final = "/page/"

_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'{script}",
        "style-src 'self'{style}",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Load only from this server, connect only to it, and forbid frames. script, style: hashes."""
_BLOCKING: Final = re.compile(
    r'<link rel="stylesheet" href="page/(?P<style>.+)">|<script src="page/(?P<script>.+)"></script>'
)
"""What a document needs before it is painted; modules are not among it."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page.

    path: in URLs. compressed: the content as gzip, for clients that accept it. tag: hash of the
    content. policy: Content-Security-Policy.
    """

    path: str
    content: bytes
    compressed: bytes
    media_type: str
    tag: str
    policy: str

    @property
    def headers(self) -> dict[str, str]:
        """Response headers; browsers check on each load whether the file has changed."""
        return {
            "vary": "accept-encoding",
            "content-type": self.media_type,
            "etag": self.tag,
            "cache-control": "no-cache",
            "content-security-policy": self.policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
        }


@cache
def page_files() -> tuple[PageFile, ...]:
    """Read all files: the page at `/`, the API's at `/docs`, and what they load, in `/page/`."""
    return tuple(_read(path) for path in sorted(ASSETS.iterdir()) if path.suffix in _MEDIA_TYPES)


def _read(path: Path) -> PageFile:
    content, policy = path.read_bytes(), _POLICY.format(script="", style="")
    if path.name in PAGES:
        content, policy = _inline(content.decode())
    return PageFile(
        path=PAGES.get(path.name, FOLDER + path.name),
        content=content,
        compressed=gzip.compress(content, mtime=0),
        media_type=_MEDIA_TYPES[path.suffix],
        tag=f'"{hashlib.sha256(content).hexdigest()[:20]}"',
        policy=policy,
    )


def _inline(document: str) -> tuple[bytes, str]:
    """Put style sheets and classic scripts into a document, so that it is painted without them.

    Return it with the policy that allows what was put in, by its hashes.
    """
    hashes = {"style": "", "script": ""}

    def content(found: re.Match[str]) -> str:
        ((tag, name),) = ((tag, name) for tag, name in found.groupdict().items() if name)
        text = (ASSETS / name).read_text("utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag] += f" 'sha256-{digest}'"
        return f"<{tag}>{text}</{tag}>"

    return _BLOCKING.sub(content, document).encode(), _POLICY.format(**hashes)

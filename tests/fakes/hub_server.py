"""A hub on this machine that speaks the protocol of huggingface.co to huggingface_hub.

Small files are in git: their ETag is git's SHA-1. Large ones (`LARGE`) are in LFS: their ETag is
the SHA-256, and the answer redirects to the address of a CDN, another host.

The fields of a `Repository` and the methods of `HubServer` make what goes wrong on a real one.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")
COMMIT = "a" * 40
_MODEL = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/tree/([^/]+)(?:/.*)?")
_RESOLVE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """A repository. files: content by path. sizes, hashes: what the hub claims
    instead of the true ones of git.

    is_gated: needs a token in `readers`. is_private: does not exist for others.
    """

    files: dict[str, bytes]
    revisions: Mapping[str, str] = field(default_factory=lambda: {"main": COMMIT})
    is_gated: bool = False
    is_private: bool = False
    readers: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HubRequest:
    method: str
    path: str
    range: str | None
    token: str | None
    on_cdn: bool


class HubServer:
    """Serves repositories; `url` is for HF_ENDPOINT. requests: all that have arrived.

    num_sent: bytes of bodies. has_ranges: whether parts of large files are sent.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[HubRequest] = []
        self.num_sent = 0
        self.has_ranges = True
        self.breaks: Counter[str] = Counter()
        self.sends: dict[str, bytes] = {}
        self.status: int | None = None
        self.may_send = threading.Event()
        self.may_send.set()
        self.is_sending = threading.Event()
        self.break_after = 1000
        hub = self

        class Handler(_Handler):
            server_of_test = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.may_send.set()
        self._server.shutdown()
        self._server.server_close()

    def downloads(self) -> list[str]:
        """Return the paths of files whose content was requested, without redirects."""
        return [
            each.path
            for each in self.requests
            if each.method == "GET" and (each.on_cdn or "/resolve/" in each.path)
        ]

    def break_connections(self, content: bytes, times: int, after: int = 1000) -> None:
        """Close the connection after some bytes of a large file, a number of times."""
        self.breaks[hashlib.sha256(content).hexdigest()] = times
        self.break_after = after

    def damage(self, content: bytes) -> None:
        """Send other bytes of the same length for a large file."""
        self.sends[hashlib.sha256(content).hexdigest()] = bytes(byte ^ 1 for byte in content)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_test: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server_of_test
        path = unquote(urlsplit(self.path).path)
        on_cdn = self.headers["Host"].startswith("localhost")
        authorization = self.headers.get("Authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        hub.requests.append(
            HubRequest(self.command, path, self.headers.get("Range"), token, on_cdn)
        )
        if hub.status is not None:
            self._send(hub.status, b"")
        elif on_cdn:
            self._send_large(path.removeprefix("/lfs/"))
        elif match := _MODEL.fullmatch(path):
            self._with_repository(match[1], match[2] or "main", token, None)
        elif match := _TREE.fullmatch(path):
            self._with_repository(match[1], match[2], token, None, as_tree=True)
        elif match := _RESOLVE.fullmatch(path):
            self._with_repository(match[1], match[2], token, match[3])
        else:
            self._send(404, b"")

    def _with_repository(
        self, name: str, revision: str, token: str | None, file: str | None, as_tree: bool = False
    ) -> None:
        repository = self.server_of_test.repositories.get(name)
        may_read = repository is not None and token in repository.readers
        if repository is None or (repository.is_private and not may_read):
            # as the real one answers without a token, so that private names do not leak
            status = 401 if token is None else 404
            self._send_error(status, "RepoNotFound", "Repository not found")
            return
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.revisions.values():
            self._send_error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif file is None:
            self._send_json(_tree(repository) if as_tree else _info(name, commit, repository))
        elif repository.is_gated and not may_read:
            self._send_error(
                401 if token is None else 403,
                "GatedRepo",
                f"Access to model {name} is restricted.",
            )
        elif file not in repository.files:
            self._send_error(404, "EntryNotFound", "Entry not found")
        else:
            self._send_file(commit, file, repository.files[file])

    def _send_file(self, commit: str, file: str, content: bytes) -> None:
        if file.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            location = f"http://localhost:{self.server_of_test.port}/lfs/{digest}"
            headers = {
                "X-Repo-Commit": commit,
                "X-Linked-Size": str(len(content)),
                "X-Linked-ETag": f'"{digest}"',
                "Location": location,
            }
            self._send(302, b"", headers)
        else:
            self._send(200, content, {"X-Repo-Commit": commit, "ETag": f'"{_git_hash(content)}"'})

    def _send_large(self, digest: str) -> None:
        hub = self.server_of_test
        contents = (
            content
            for repository in hub.repositories.values()
            for content in repository.files.values()
            if hashlib.sha256(content).hexdigest() == digest
        )
        content = next(contents)
        content = hub.sends.get(digest, content)
        begin, status, headers = 0, 200, {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        given = self.headers.get("Range")
        if given and hub.has_ranges:
            first, _, last = given.removeprefix("bytes=").partition("-")
            begin, status, size = int(first), 206, len(content)
            content = content[: int(last) + 1] if last else content
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{size}"
        hub.is_sending.set()
        hub.may_send.wait(30)
        if hub.breaks[digest] > 0:
            hub.breaks[digest] -= 1
            self._start(status, len(content) - begin, headers)
            self.wfile.write(content[begin : begin + hub.break_after])
            self.close_connection = True
        else:
            self._send(status, content[begin:], headers)

    def _send_error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._start(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)
            self.server_of_test.num_sent += len(body)

    def _start(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entries(repository: Repository) -> list[dict[str, Any]]:
    found = []
    for name, content in repository.files.items():
        size = repository.sizes.get(name, len(content))
        entry: dict[str, Any] = {"name": name, "size": size}
        entry["oid"] = repository.hashes.get(name) or _git_hash(content)
        if name.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size}
        found.append(entry)
    return found


def _info(name: str, commit: str, repository: Repository) -> dict[str, Any]:
    """Return what /api/models/NAME?blobs=true answers."""
    siblings = []
    for entry in _entries(repository):
        sibling = {"rfilename": entry["name"], "size": entry["size"], "blobId": entry["oid"]}
        if lfs := entry.get("lfs"):
            sibling["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": 130}
        siblings.append(sibling)
    return {
        "_id": "0" * 24,
        "id": name,
        "modelId": name,
        "sha": commit,
        "private": repository.is_private,
        "gated": "manual" if repository.is_gated else False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": siblings,
    }


def _tree(repository: Repository) -> list[dict[str, Any]]:
    found = []
    for entry in _entries(repository):
        item = {"type": "file", "path": entry["name"], "size": entry["size"], "oid": entry["oid"]}
        if lfs := entry.get("lfs"):
            item["lfs"] = {**lfs, "pointerSize": 130}
        found.append(item)
    return found

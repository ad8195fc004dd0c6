"""The models on this machine: `tokend list` and `tokend rm`.

Packaged models are in tokend's cache folder, models of the hub in the cache of huggingface_hub,
where other programs may have put them.
"""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deploy.environment import HostEnvironment
from deploy.models import catalogue, hub
from deploy.models.fetch import exclusive
from deploy.models.gguf_parts import part_names
from deploy.models.hub import HubName
from deploy.models.prepared_folder import size_text
from deploy.models.store import read_manifest
from proto.errors import ModelError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

_UNFINISHED: Final = "incomplete"


@dataclass(frozen=True)
class StoredModel:
    """A model on the disk.

    name: as `tokend serve` takes it. form: format of the weights. last_used: when its weights were
    last read or written, as far as the file system notes it, in seconds of the Unix clock.
    """

    name: str
    num_bytes: int
    form: str
    last_used: float


def stored_models(environment: HostEnvironment) -> list[StoredModel]:
    """Return the models, by name, that were downloaded, by tokend or others, in whole or in part.

    Repositories of the hub without weights that tokend reads are left out.
    """
    found = [*_packaged(environment), *_of_hub(environment)]
    return sorted(found, key=lambda model: model.name.lower())


def table(models: list[StoredModel]) -> list[str]:
    """Return the lines of `tokend list`."""
    width = max([4, *(len(model.name) for model in models)])
    lines = [f"{'NAME':{width}}  {'SIZE':>9}  {'FORMAT':24}LAST USED"]
    for model in models:
        used = datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d %H:%M")
        size = size_text(model.num_bytes)
        lines.append(f"{model.name:{width}}  {size:>9}  {model.form:24}{used}")
    return lines


def _packaged(environment: HostEnvironment) -> Iterator[StoredModel]:
    for model in catalogue.MODELS:
        if catalogue.is_fetched(model, environment.cache):
            path = Path(catalogue.file_path(model, environment.cache))
            yield _stored(model.name, f"GGUF {hub.quantisation(model.file_name)}", [path])


def _of_hub(environment: HostEnvironment) -> Iterator[StoredModel]:
    repositories = _repositories(environment)
    for name, repository in repositories.items():
        unfinished = f", {_UNFINISHED}" if _has_unfinished(repository.repo_path) else ""
        files = _blobs(repository)
        if any(each.endswith(".safetensors") and "/" not in each for each in files):
            yield _stored(name, f"safetensors{unfinished}", set().union(*files.values()))
            continue
        models = hub.gguf_models(files)
        kinds = [hub.quantisation(each) for each in models]
        for first, kind in zip(models, kinds, strict=True):
            tag = kind if kind and kinds.count(kind) == 1 else os.path.basename(first)
            hub_name = HubName(name, tag if len(models) > 1 else "")
            blobs = {blob for part in part_names(first) for blob in files.get(part, ())}
            yield _stored(str(hub_name), f"GGUF {kind}{unfinished}", blobs)
    for folder in Path(environment.hugging_face_cache).glob("models--*--*"):
        name = hub.repository_of(folder)
        if name not in repositories and _has_unfinished(folder):
            yield _stored(name, _UNFINISHED, (folder / "blobs").iterdir())


def _stored(name: str, form: str, files: Iterable[Path]) -> StoredModel:
    stats = [each.stat() for each in files]
    used = max(max(each.st_atime, each.st_mtime) for each in stats)
    return StoredModel(name, sum(each.st_size for each in stats), form, used)


def _repositories(environment: HostEnvironment) -> "dict[str, CachedRepoInfo]":
    """Return the repositories of models in the cache of the hub that have a snapshot, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(environment.hugging_face_cache).repos
    except CacheNotFound:
        return {}
    return {each.repo_id: each for each in found if each.repo_type == "model"}


def _blobs(repository: "CachedRepoInfo") -> dict[str, set[Path]]:
    """Return the blobs of each file, by its path in the repository, in all its revisions."""
    found: dict[str, set[Path]] = {}
    for revision in repository.revisions:
        for file in revision.files:
            name = file.file_path.relative_to(revision.snapshot_path).as_posix()
            found.setdefault(name, set()).add(file.blob_path)
    return found


def _has_unfinished(repository: Path) -> bool:
    return any((repository / "blobs").glob("*.incomplete"))


def remove(name: str, environment: HostEnvironment) -> int:
    """Remove a model that was downloaded, with what was prepared of it; return the bytes freed.

    A name with a colon removes one GGUF model of a repository. Raises ModelError if there is no
    such model here.
    """
    stored = {model.name: model for model in stored_models(environment)}
    packaged, hub_name = catalogue.find(name), hub.parse_name(name)
    if packaged is not None and name in stored:
        folder = Path(catalogue.models_root(environment.cache), packaged.name)
        shutil.rmtree(folder)
        _remove_prepared([folder], environment)
        return stored[name].num_bytes
    repositories = {each.partition(":")[0] for each in stored}
    if hub_name is None or hub_name.repository not in repositories:
        if os.path.exists(name):
            raise ModelError(f"{name} was not downloaded by tokend: remove it yourself")
        near = hub.near(name, stored)
        raise ModelError(f"there is no model {name} here{near}; tokend list lists them")
    cache = environment.hugging_face_cache
    with exclusive(hub.lock_path(cache, hub_name.repository)):
        if hub_name.file:
            return _remove_gguf(hub_name, environment)
        folder = hub.repository_folder(cache, hub_name.repository)
        num_bytes = sum(each.lstat().st_size for each in (folder / "blobs").glob("*"))
        _remove_prepared([folder], environment)
        shutil.rmtree(folder)
        shutil.rmtree(Path(cache, ".locks", folder.name), ignore_errors=True)
        return num_bytes


def _remove_gguf(name: HubName, environment: HostEnvironment) -> int:
    """Remove the files of one GGUF model of a repository in all revisions; return the bytes."""
    repository = _repositories(environment)[name.repository]
    files = _blobs(repository)
    chosen = hub.select_gguf(files, name)
    kept = {blob for each, blobs in files.items() if each not in chosen for blob in blobs}
    blobs = {blob for each in chosen for blob in files[each]} - kept
    num_bytes = sum(blob.stat().st_size for blob in blobs)
    _remove_prepared(blobs, environment)
    for revision in repository.revisions:
        for each in chosen:
            with contextlib.suppress(FileNotFoundError):
                (revision.snapshot_path / each).unlink()
    for blob in blobs:
        blob.unlink()
    return num_bytes


def _remove_prepared(sources: Collection[Path], environment: HostEnvironment) -> None:
    """Remove what was prepared of models whose files are one of the paths, or below it."""
    roots = {Path(os.path.realpath(each)) for each in sources}
    for folder in Path(catalogue.prepared_root(environment.cache)).glob("*"):
        manifest = read_manifest(str(folder))
        if manifest is not None:
            path = Path(os.path.realpath(manifest.source))
            if roots.intersection((path, *path.parents)):
                shutil.rmtree(folder)

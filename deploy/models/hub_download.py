"""The process that downloads a model of the Hugging Face hub into the cache of huggingface_hub.

Command line: `python -m deploy.models.hub_download REPOSITORY FILE KIND REVISION CACHE EXTENT
MMPROJ`; FILE and REVISION may be empty, EXTENT is "all" or "headers", MMPROJ "mmproj" or empty.
Token, address of the hub and offline mode are the variables of huggingface_hub (HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE).

    model_info                 files with sizes and hashes: what is needed, and whether it fits;
                               config.json first, which may name a model that is not supported
    GET, for each file         into blobs/HASH.tokend.incomplete, from where it broke off
    SHA-256                    then renamed to blobs/HASH
    snapshot_download          finds the blobs and makes the snapshot of them

The last function alone would begin a broken file again from its first byte in the next process, and
compares sizes but no hashes.
"""

import errno
import glob
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from deploy.models import gguf_header, hf_folder
from deploy.models.child_process import ChildMessage
from deploy.models.hub import (
    INDEX_FILE,
    HubName,
    Kind,
    indexed_files,
    repository_folder,
    select_files,
)
from deploy.models.prepared_folder import check_space, size_text
from proto.errors import ModelError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_NUM_THREADS: Final = 4
"""Files that are downloaded at the same time."""
_POLL_SECONDS: Final = 0.2
_TIMEOUT_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Waits after a connection that broke without a byte; then the download fails."""
_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FIRST_HEADER_BYTES: Final = 1 << 20
"""Bytes of a file with weights that are asked for first, if only its header is wanted."""
_MAX_HEADER_BYTES: Final = 128 << 20
_TOKEN_PLACES: Final = "HF_TOKEN, --hf-token or hf auth login"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. sha256: of its content; "" for a small one, which has a git hash.

    blob_id: git's SHA-1. size: in bytes.
    """

    name: str
    size: int
    blob_id: str
    sha256: str

    @property
    def key(self) -> str:
        """Name of its blob in the cache."""
        return self.sha256 or self.blob_id


def download(
    name: HubName,
    kind: Kind,
    revision: str | None,
    cache: str,
    *,
    headers_only: bool = False,
    with_mmproj: bool = True,
) -> str:
    """Download what is missing of a model, and return the folder of its snapshot.

    headers_only: of weights only the headers; the rest of their files is a hole. with_mmproj: as in
    `select_files`.
    """
    from huggingface_hub import HfApi, snapshot_download

    api = HfApi(library_name="tokend")
    info = api.model_info(
        name.repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
    )
    files = {
        each.rfilename: HubFile(
            each.rfilename,
            each.size or 0,
            each.blob_id or "",
            each.lfs.sha256 if each.lfs is not None else "",
        )
        for each in info.siblings or ()
    }
    if not all(_HASH.fullmatch(each.key) for each in files.values()):  # they become paths
        raise ModelError(f"the hub gives no valid hash for each file of {name}")
    needed = select_files(files, name, kind, with_mmproj=with_mmproj)
    transfer = (HeaderTransfer if headers_only else Transfer)(name, str(info.sha), cache)
    if kind == "model" and "config.json" in needed:
        transfer.fetch([files["config.json"]])
        hf_folder.check_config(hf_folder.read_object(transfer.blob(files["config.json"])))
    if INDEX_FILE in needed:
        transfer.fetch([files[INDEX_FILE]])
        needed += indexed_files(transfer.blob(files[INDEX_FILE]))
        missing = [each for each in needed if each not in files]
        if missing:
            raise ModelError(f"{name} has no {missing[0]}, which its weight index names")
    transfer.fetch([files[each] for each in needed])
    patterns = [glob.escape(each) for each in needed]
    return snapshot_download(
        name.repository, revision=revision, cache_dir=cache, allow_patterns=patterns
    )


class Transfer:
    """Downloads files of one commit of a repository into the blobs of the cache."""

    def __init__(self, name: HubName, commit: str, cache: str) -> None:
        self._name = name
        self._commit = commit
        self._blobs = repository_folder(cache, name.repository) / "blobs"

    def blob(self, file: HubFile) -> Path:
        return self._blobs / file.key

    def fetch(self, files: Iterable[HubFile]) -> None:
        """Download files that are not there; raises ModelError, and the errors of the library.

        Checks for space first: the disk must have what is still to come.
        """
        missing = {each.key: each for each in files if not self.blob(each).exists()}
        total = sum(each.size for each in missing.values())
        before = self._num_arrived(missing.values())
        self._blobs.mkdir(parents=True, exist_ok=True)
        check_space(str(self._blobs), total - before)
        self._check_sizes(missing.values())
        began = time.monotonic()
        count = f"{len(missing)} files, " if len(missing) > 1 else ""
        pool = ThreadPoolExecutor(_NUM_THREADS)
        running = {pool.submit(self._fetch_file, each) for each in missing.values()}
        try:
            while running:
                done, running = wait(running, _POLL_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                arrived = self._num_arrived(missing.values())
                rate = (arrived - before) / max(_POLL_SECONDS, time.monotonic() - began)
                share = arrived / total if total else 1.0
                detail = f"{share:.0%}, {size_text(rate)}/s"
                ChildMessage("progress", f"{count}{size_text(total)}", share, detail).send()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._disk_is_full(missing.values()) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_sizes(self, files: Iterable[HubFile]) -> None:
        from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE as LIMIT

        for file in files:
            if file.size > LIMIT:
                raise ModelError(
                    f"{file.name} of {self._name} has {size_text(file.size)}, and the hub sends at "
                    f"most {size_text(LIMIT)} without hf_xet: download it with hf download"
                )

    def _disk_is_full(self, files: Iterable[HubFile]) -> ModelError:
        rest = sum(each.size for each in files) - self._num_arrived(files)
        free = shutil.disk_usage(self._blobs).free
        return ModelError(
            f"the disk of {self._blobs} is full: {size_text(rest)} of {self._name} are still to "
            f"come and {size_text(free)} are free; the next try continues there"
        )

    def _num_arrived(self, files: Iterable[HubFile]) -> int:
        """Return how many bytes of files are on the disk."""
        found = 0
        for file in files:
            for path in (self.blob(file), self._partial(file)):
                try:
                    found += min(file.size, path.stat().st_size)
                except FileNotFoundError:
                    continue
                break
        return found

    def _partial(self, file: HubFile) -> Path:
        return self._blobs / f"{file.key}.tokend.incomplete"

    def _fetch_file(self, file: HubFile) -> None:
        """Download a file, from where an earlier try broke off, and check it."""
        partial = self._partial(file)
        with partial.open("ab") as stream:
            if stream.tell() > file.size:
                stream.truncate(0)
            self._receive(file, stream)
            stream.flush()
            os.fsync(stream.fileno())
        wrong = _difference(file, partial)
        if wrong:
            partial.unlink()
            raise ModelError(
                f"{file.name} of {self._name} arrived damaged and was removed; try again: {wrong}"
            )
        os.replace(partial, self.blob(file))

    def _receive(self, file: HubFile, stream: BinaryIO) -> None:
        """Append what is missing of a file; a connection that breaks is opened again.

        The library's function does so only for some errors, and for five seconds.
        """
        from huggingface_hub.errors import HfHubHTTPError

        failures = 0
        while (before := stream.tell()) < file.size:
            problem: Exception = OSError(f"the connection for {file.name} broke")
            try:
                for chunk in self._stream(file, before, file.size):
                    stream.write(chunk)
            except _network_error() as error:
                if isinstance(error, HfHubHTTPError) and not _may_pass(error):
                    raise
                problem = error
            stream.flush()
            arrived = stream.tell()
            if arrived == file.size:
                return
            failures = 0 if arrived > before else failures + 1
            if failures > len(_RETRY_SECONDS):
                raise problem
            place = f"{size_text(arrived)} of {size_text(file.size)}"
            ChildMessage("notice", f"{file.name} broke off at {place}; trying again").send()
            time.sleep(_RETRY_SECONDS[max(0, failures - 1)])

    def _stream(self, file: HubFile, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [begin, end) of a file; reads no more of a server without ranges.

        Fewer come if the connection breaks. Raises the errors of the library.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(self._name.repository, file.name, revision=self._commit)
        headers = {
            **build_hf_headers(library_name="tokend"),
            "Accept-Encoding": "identity",  # a compressed answer could not be continued
            "Range": f"bytes={begin}-{end - 1}",
        }
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_SECONDS
        ) as response:
            hf_raise_for_status(response)
            position = begin if response.status_code == 206 else 0
            for chunk in response.iter_bytes(1 << 20):
                yield chunk[max(0, begin - position) : end - position]
                position += len(chunk)
                if position >= end:
                    return


class HeaderTransfer(Transfer):
    """Downloads the headers of files with weights, and other files whole.

    A file with weights becomes a sparse one of the true size, which takes no more space than its
    header. What reads headers and sizes reads it like the whole file; the weights are zeros.
    """

    def fetch(self, files: Iterable[HubFile]) -> None:
        files = list(files)
        weights = [each for each in files if each.name.endswith((".safetensors", ".gguf"))]
        super().fetch(each for each in files if each not in weights)
        for number, file in enumerate(weights):
            ChildMessage("progress", f"file {number + 1} of {len(weights)}").send()
            if not self.blob(file).exists():
                self._fetch_header(file)

    def _fetch_header(self, file: HubFile) -> None:
        partial = self._partial(file)
        begin, end = 0, min(_FIRST_HEADER_BYTES, file.size)
        with partial.open("w+b") as stream:
            while begin < end:
                stream.seek(begin)
                stream.writelines(self._stream(file, begin, end))
                if stream.tell() < end:
                    raise ModelError(
                        f"the connection broke in the header of {file.name}; try again"
                    )
                stream.truncate(file.size)
                stream.flush()
                begin, end = end, min(_header_bytes(partial, file, end), file.size)
        os.replace(partial, self.blob(file))


def _header_bytes(path: Path, file: HubFile, arrived: int) -> int:
    """Return how many bytes of a file its header needs; `arrived` if that is enough or invalid."""
    if file.name.endswith(".safetensors"):
        with path.open("rb") as stream:
            needed = 8 + int.from_bytes(stream.read(8), "little")
    else:
        try:
            needed = gguf_header.read(str(path)).num_bytes
        except ModelError:
            needed = 2 * arrived  # most often because it goes on behind what has arrived
    return needed if arrived < needed <= _MAX_HEADER_BYTES else arrived


def _difference(file: HubFile, path: Path) -> str:
    """Return how a file differs from what the hub says about it; "" if it does not."""
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size:,} bytes and should have {file.size:,}"
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {size}\0".encode())
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() == file.key:
        return ""
    kind = "SHA-256" if file.sha256 else "git hash"
    return f"its {kind} is {digest.hexdigest()} and should be {file.key}"


def _may_pass(error: "HfHubHTTPError") -> bool:
    """Whether a later try may have another answer."""
    return error.response.status_code >= 500 or error.response.status_code in (408, 429)


def _network_error() -> type[Exception]:
    """Return the error of the library's HTTP client, which has other names in other versions."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def describe(error: Exception, name: HubName, revision: str | None) -> ChildMessage:
    """Return what a user should know about an error of the library."""
    from huggingface_hub import constants, errors, get_token

    hub = constants.ENDPOINT
    page = f"{hub}/{name.repository}"
    if isinstance(error, errors.GatedRepoError):
        if get_token() is None:
            need = f"and give a token of that account ({hub}/settings/tokens) by {_TOKEN_PLACES}"
        else:
            need = "with the account of the token that was sent, which has no access yet"
        return ChildMessage("error", f"{name} is gated: ask for access at {page} {need}")
    if isinstance(error, errors.RepositoryNotFoundError):
        private = (
            f"is private, which needs a token ({_TOKEN_PLACES})"
            if get_token() is None
            else "is private and the token that was sent may not read it"
        )
        return ChildMessage("unknown", f"{hub} has no model {name.repository}, or it {private}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ChildMessage("error", f"{name.repository} has no revision {revision}: see {page}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        text = f"{name} is not, or not all, in the Hugging Face cache, and HF_HUB_OFFLINE is set"
        return ChildMessage("unreachable", text)
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status == 401:
            return ChildMessage("error", f"{hub} refuses the token ({_TOKEN_PLACES})")
        if status == 429:
            return ChildMessage("error", f"{hub} takes no more requests for now; try again later")
        kind = "unreachable" if status >= 500 else "error"
        return ChildMessage(
            kind, f"{hub} answered with status {status} for {name}; try again later"
        )
    if isinstance(error, _network_error() | errors.LocalEntryNotFoundError):
        cause = error.__cause__ or error
        text = " ".join(str(cause).split()) or type(cause).__name__
        return ChildMessage("unreachable", f"{hub} cannot be reached for {name}: {text}")
    return ChildMessage("error", f"{name} cannot be downloaded: {' '.join(str(error).split())}")


def main(arguments: Sequence[str]) -> int:
    """Download a model and print its folder; return the exit status, 2 for an error."""
    repository, file, kind, revision, cache, extent, mmproj = arguments
    name = HubName(repository, file)
    try:
        folder = download(
            name,
            "head" if kind == "head" else "model",
            revision or None,
            cache,
            headers_only=extent == "headers",
            with_mmproj=bool(mmproj),
        )
    except ModelError as error:
        message = ChildMessage("error", str(error))
    except Exception as error:  # a library's; the user gets one line of it
        message = describe(error, name, revision)
    else:
        message = ChildMessage("result", folder)
    message.send()
    return 0 if message.kind == "result" else 2


if __name__ == "__main__":
    status = 1
    try:
        status = main(sys.argv[1:])
    finally:
        # Without a wait for other files, which the next try continues: it may begin at once. The
        # parent, which holds the lock, may have died: then the last message raised an error.
        os._exit(status)

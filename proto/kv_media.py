"""What engine and workers agree on about media that outlive them: settings, and names of blocks.

A block lies outside the daemon once for every rank, under a name that both halves can make:

    disk     DISK_PATH / FOLDER / 3f / 3f0c…  .0      first two digits, key, rank
    remote   tokend:1:FOLDER:3f0c…:0

where FOLDER tells models, arithmetics, numbers of ranks and sizes of blocks apart. Knows
nothing of what is in a block.
"""

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from proto.errors import ConfigError
from proto.kv_transfer_config import FIELD
from proto.offload_settings import OffloadSettings, wrong

DISK_SPEC: Final = "DiskOffloadingSpec"
REMOTE_SPEC: Final = "RemoteOffloadingSpec"
TEMPORARY: Final = ".new"
"""End of the name of a file that is being written."""
DISK: Final = "disk"
REMOTE: Final = "remote"
"""Names of the media."""
KEY_BYTES: Final = 37
"""Of an offloaded block's key: a hash of 32, group, number of ranks, and factor."""
MAX_KEY_BYTES: Final = 96
"""Of any key that a worker is given; a file name ends at 255 characters."""
FORMAT_VERSION: Final = 1
"""Counts changes of how a block is written down."""
HEADER_BYTES: Final = 256
"""Before the bytes of a block, wherever it is kept."""
_NAME_CHARACTERS: Final = 32
_SCHEMES: Final = ("redis", "rediss", "unix")
_REDIS_PORT: Final = 6379
_FILE_NAME: Final = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.(0|[1-9][0-9]{{0,4}})")
_S = TypeVar("_S", bound=msgspec.Struct)


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `kv_connector_extra_config` says of a disk.

    disk_path: folder that nobody else may write to; made if it is not there. Where its group may,
        see `own_folder`.
    disk_bytes_to_use: of all files in it.
    load_timeout: seconds after which a load is given up. store_timeout: seconds after which a
        store is, counted from when it was ordered.
    """

    disk_path: str
    disk_bytes_to_use: int
    load_timeout: float = 2.0
    store_timeout: float = 5.0


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `kv_connector_extra_config` says of a remote store.

    remote_url: redis://HOST:PORT/DB, rediss://… or unix:///PATH, without a password.
    remote_url_file: file with such a URL, which may have one.
    remote_timeout: seconds to wait for an answer. remote_retry_seconds: for which nothing is
        asked once one was missing; up to sixteen times that while it stays away.
    load_timeout, store_timeout: as for a disk.
    """

    remote_url: str | None = None
    remote_url_file: str | None = None
    remote_timeout: float = 0.5
    remote_retry_seconds: float = 2.0
    load_timeout: float = 2.0
    store_timeout: float = 5.0


class RemoteAddress(msgspec.Struct, frozen=True):
    """Where a remote store is, and who asks. path: of a Unix socket, else empty."""

    host: str
    port: int
    path: str
    tls: bool
    database: int
    username: str
    password: str

    def __repr__(self) -> str:
        """Without the password, for messages."""
        return f"unix://{self.path}" if self.path else f"{self.host}:{self.port}"


def disk_settings(extra: Mapping[str, Any]) -> DiskSettings:
    """Raises ConfigError naming the key that is missing or wrong."""
    settings = _settings(DISK_SPEC, extra, DiskSettings)
    if not os.path.isabs(settings.disk_path):
        raise wrong("disk_path", f"must be an absolute path, got {settings.disk_path!r}")
    if settings.disk_bytes_to_use < 1:
        raise wrong("disk_bytes_to_use", f"must be at least 1, got {settings.disk_bytes_to_use}")
    _positive(load_timeout=settings.load_timeout, store_timeout=settings.store_timeout)
    return settings


def remote_settings(extra: Mapping[str, Any]) -> RemoteSettings:
    """Raises ConfigError naming the key that is missing or wrong."""
    settings = _settings(REMOTE_SPEC, extra, RemoteSettings)
    _positive(
        load_timeout=settings.load_timeout,
        store_timeout=settings.store_timeout,
        remote_timeout=settings.remote_timeout,
        remote_retry_seconds=settings.remote_retry_seconds,
    )
    if (settings.remote_url is None) == (settings.remote_url_file is None):
        raise wrong("remote_url", "or remote_url_file is needed, and not both")
    if settings.remote_url is not None and _address("remote_url", settings.remote_url).password:
        raise wrong("remote_url", "must not have a password, which would be seen by others")
    return settings


def remote_address(settings: RemoteSettings) -> RemoteAddress:
    """Reads the file, if that is where the URL is; raises ConfigError without what is in it."""
    if settings.remote_url is not None:
        return _address("remote_url", settings.remote_url)
    assert settings.remote_url_file is not None, "remote_settings() checks it"
    try:
        with open(settings.remote_url_file, encoding="utf-8") as stream:
            url = stream.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise wrong("remote_url_file", f"{settings.remote_url_file}: {reason}") from None
    return _address("remote_url_file", url)


def own_folder(disk_path: str) -> Path:
    """Where files are kept: in `disk_path`, or where its group may write to it in a folder below.

    That one is made for this user alone, and made so again where it no longer is: a volume of
    Kubernetes with an fsGroup belongs to root and to a group, and its files are opened to the group
    when it is mounted. Raises ConfigError where somebody else has put something there.

        disk_path   root:kv 2770     tokend-10001   10001 0700     files   10001 0600
    """
    path = Path(disk_path)
    try:
        facts = os.stat(path)
    except OSError:
        return path
    is_of_a_group = facts.st_uid in (0, os.geteuid()) and facts.st_mode & 0o022 == 0o020
    if not is_of_a_group:
        return path
    own = path / f"tokend-{os.geteuid()}"
    with contextlib.suppress(FileExistsError, PermissionError):
        own.mkdir(mode=0o700)
    try:
        found = os.lstat(own)
    except OSError as error:
        raise wrong("disk_path", f"{own} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise wrong("disk_path", f"{own} is not a folder")
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        own.chmod(0o700)
    return own


def is_private(facts: os.stat_result) -> bool:
    """Whether only this user can have written what a file says."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def check_private(folder: str | Path) -> None:
    """Raise ConfigError where others may write to a folder: a block can be made up by whoever may.

    What is not there is made for this user alone.
    """
    try:
        facts = os.stat(folder)
    except OSError:
        return
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid != os.geteuid():
        fault = f"belongs to user {facts.st_uid}, not to {os.geteuid()}"
    elif mode & 0o022:
        fault = f"may be written to by others (mode {mode:04o})"
    else:
        return
    raise wrong(
        "disk_path",
        f"needs a folder of this user alone (one below it is made so), or of a group: "
        f"{folder} {fault}",
    )


def media_folder(fingerprint: bytes, num_ranks: int, factor: int) -> str:
    """What blocks of one arithmetic, cut and size are kept under.

    factor: device blocks of an offloaded one. Ranks may have blocks of other sizes than each other.
    """
    return f"{fingerprint.hex()[:_NAME_CHARACTERS]}-{num_ranks}x{factor}"


def file_name(key: bytes, rank: int) -> str:
    """Path of a block's file within its folder."""
    name = key.hex()
    return f"{name[:2]}/{name}.{rank}"


def is_media_folder(name: str) -> bool:
    """Whether a folder is one that `media_folder` could have named."""
    return re.fullmatch(r"[0-9a-f]{1,32}-[0-9]+x[0-9]+", name) is not None


def parse_file_name(name: str) -> tuple[bytes, int] | None:
    """Key and rank of a file, by its name alone; None where it is no block's."""
    found = _FILE_NAME.fullmatch(name)
    return None if found is None else (bytes.fromhex(found[1]), int(found[2]))


def remote_name(folder: str, key: bytes, rank: int) -> bytes:
    """Name of a block in a remote store."""
    return f"tokend:{FORMAT_VERSION}:{folder}:{key.hex()}:{rank}".encode()


def _settings(spec: str, extra: Mapping[str, Any], kind: type[_S]) -> _S:
    known = {each: extra[each] for each in kind.__struct_fields__ if each in extra}
    for key in extra:
        if key not in known and key not in OffloadSettings.__struct_fields__:
            raise wrong(key, f"is not known to {spec}; it has {', '.join(kind.__struct_fields__)}")
    try:
        return msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--kv-transfer-config: kv_connector_extra_config of {spec}: {error}",
            FIELD,
        ) from None


def _address(key: str, url: str) -> RemoteAddress:
    try:
        parts = urlsplit(url)
        port = parts.port or _REDIS_PORT
    except ValueError:
        raise wrong(key, "is not a URL") from None
    unix = parts.scheme == "unix"
    if parts.scheme not in _SCHEMES or not (parts.path if unix else parts.hostname):
        raise wrong(key, "must be redis://HOST:PORT/DATABASE, rediss://… or unix:///PATH")
    database = "" if unix else parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        raise wrong(key, "names a database that is no number")
    return RemoteAddress(
        host=parts.hostname or "",
        port=port,
        path=parts.path if unix else "",
        tls=parts.scheme == "rediss",
        database=int(database or 0),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )


def _positive(**values: float) -> None:
    for key, value in values.items():
        if not 0.0 < value < 3600.0:
            raise wrong(key, f"must be more than 0 and less than 3600 seconds, got {value}")

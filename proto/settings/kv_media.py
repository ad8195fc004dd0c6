"""Where KV blocks are kept outside the daemon: names of files and Redis keys, and private folders.

Engine and workers derive the same name for a block; there is one file or value for each rank:

    disk             DISK_PATH / FOLDER / 3f / 3f0c….0        first two hex digits, key, rank
    Redis            tokend:1:FOLDER:3f0c…:0
    shared storage   SHARED_STORAGE_PATH / fingerprint / HASH.RANK-of-RANKS

FOLDER differs between models, dtypes, numbers of ranks and sizes of offloaded blocks, and between
KV and recurrent states.
"""

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Final

from proto.errors import ConfigError
from proto.settings.kv_transfer_config import FIELD, KVTransferConfig, config_key_error

TEMPORARY: Final = ".new"
"""Suffix of a file that is being written."""
DISK: Final = "disk"
REMOTE: Final = "remote"
"""Names of the media, in transfer jobs, metrics and logs."""
KEY_BYTES: Final = 37
"""Length of an offloaded block's key: hash (32), group (1), number of ranks (2), factor (2)."""
STATES: Final = 0
"""In place of a factor in the name of a folder: it has the recurrent states of a model."""
MAX_KEY_BYTES: Final = 96
"""Limit for keys of connectors from outside; a file name ends at 255 characters."""
FORMAT_VERSION: Final = 1
"""Version of the format of stored blocks."""
HEADER_BYTES: Final = 256
"""Size of the header before the bytes of a stored block."""
SHARED_STORAGE_KEY: Final = "shared_storage_path"
_NAME_CHARACTERS: Final = 32
_FILE_NAME: Final = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.(0|[1-9][0-9]{{0,4}})")


def own_folder(disk_path: str) -> Path:
    """Return the folder for files: `disk_path`, or a subfolder if its group may write to it.

    The subfolder is made for this user alone. A Kubernetes volume with an fsGroup belongs to root
    and a group, and its files become group-writable when it is mounted; then the mode is reset.
    Raises ConfigError if another user has created the subfolder.

        disk_path   root:kv 2770     tokend-10001   10001 0700     files   10001 0600
    """
    path = Path(disk_path)
    try:
        facts = os.stat(path)
    except OSError:
        return path
    is_group_folder = facts.st_uid in (0, os.geteuid()) and facts.st_mode & 0o022 == 0o020
    if not is_group_folder:
        return path
    own = path / f"tokend-{os.geteuid()}"
    with contextlib.suppress(FileExistsError, PermissionError):
        own.mkdir(mode=0o700)
    try:
        found = os.lstat(own)
    except OSError as error:
        raise config_key_error("disk_path", f"{own} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise config_key_error("disk_path", f"{own} is not a folder")
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        own.chmod(0o700)
    return own


def is_private(facts: os.stat_result) -> bool:
    """Whether only this user can have written a file."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents for this user alone; raises OSError."""
    if not folder.parent.is_dir():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def check_private(folder: str | Path) -> None:
    """Raise ConfigError if other users may write to a folder, and so could forge KV blocks.

    A missing folder passes: it will be created for this user alone.
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
    raise config_key_error(
        "disk_path",
        f"needs a folder of this user alone (one below it is made so), or of a group: "
        f"{folder} {fault}",
    )


def media_folder(fingerprint: bytes, num_ranks: int, factor: int) -> str:
    """Return the folder name for blocks of one model, number of ranks and block size.

    factor: device blocks of an offloaded block, or STATES. Ranks may have blocks of different
    sizes.
    """
    return f"{fingerprint.hex()[:_NAME_CHARACTERS]}-{num_ranks}x{factor}"


def is_media_folder(name: str) -> bool:
    """Whether `media_folder` can have made this name."""
    return re.fullmatch(r"[0-9a-f]{1,32}-[0-9]+x[0-9]+", name) is not None


def file_name(key: bytes, rank: int) -> str:
    """Path of a block's file, relative to its media folder."""
    name = key.hex()
    return f"{name[:2]}/{name}.{rank}"


def parse_file_name(name: str) -> tuple[bytes, int] | None:
    """Return key and rank from the name of a block's file; None for other files."""
    found = _FILE_NAME.fullmatch(name)
    return None if found is None else (bytes.fromhex(found[1]), int(found[2]))


def remote_name(folder: str, key: bytes, rank: int) -> bytes:
    """Redis key of a block."""
    return f"tokend:{FORMAT_VERSION}:{folder}:{key.hex()}:{rank}".encode()


def shared_storage_folder(config: KVTransferConfig, fingerprint: bytes) -> str:
    """Create the SharedStorageConnector's folder for this model and return its path.

    It is readable by its owner only, because KV reveals prompts. Raises ConfigError if the
    configuration is wrong or the folder cannot be created.
    """
    extra = config.kv_connector_extra_config
    if unknown := sorted(set(extra) - {SHARED_STORAGE_KEY}):
        raise ConfigError(f"{FIELD}: SharedStorageConnector has no {', '.join(unknown)}", FIELD)
    path = extra.get(SHARED_STORAGE_KEY)
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"{FIELD}: SharedStorageConnector needs {SHARED_STORAGE_KEY}, a folder", FIELD
        )
    folder = os.path.join(path, fingerprint.hex()[:32])
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{FIELD}: {SHARED_STORAGE_KEY} {path}: {error.strerror}", FIELD
        ) from None
    return folder


def shared_storage_file(block_hash: bytes, rank: int, num_ranks: int) -> str:
    """File name of one rank's part of a block."""
    return f"{block_hash.hex()}.{rank}-of-{num_ranks}"


def shared_storage_hash(name: str) -> bytes | None:
    """Return the block hash from a file name; None for other files."""
    try:
        return bytes.fromhex(name.partition(".")[0])
    except ValueError:
        return None

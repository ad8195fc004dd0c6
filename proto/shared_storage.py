"""Where a SharedStorageConnector keeps its files, for both of its halves.

shared_storage_path / fingerprint / HASH.RANK-of-RANKS
"""

import os

from proto.errors import ConfigError
from proto.kv_transfer_config import FIELD, KVTransferConfig

KEY = "shared_storage_path"


def folder_of(config: KVTransferConfig, fingerprint: bytes) -> str:
    """The folder for KV of this arithmetic; raises ConfigError where it cannot be made.

    Only its owner may read what is made: KV tells what prompts were about.
    """
    extra = config.kv_connector_extra_config
    if strange := sorted(set(extra) - {KEY}):
        raise ConfigError(f"{FIELD}: SharedStorageConnector has no {', '.join(strange)}", FIELD)
    path = extra.get(KEY)
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{FIELD}: SharedStorageConnector needs {KEY}, a folder", FIELD)
    folder = os.path.join(path, fingerprint.hex()[:32])
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{FIELD}: {KEY} {path}: {error.strerror}", FIELD) from None
    return folder


def file_name(block_hash: bytes, rank: int, num_ranks: int) -> str:
    """Of one rank's part of a block."""
    return f"{block_hash.hex()}.{rank}-of-{num_ranks}"


def hash_of(name: str) -> bytes | None:
    """The block whose file has this name; None for a file of something else."""
    try:
        return bytes.fromhex(name.partition(".")[0])
    except ValueError:
        return None

"""Configuration of KV connectors: --kv-transfer-config and its kv_connector_extra_config.

`kv_transfer_config` parses the flag; its keys are those of vLLM's option of the same name, and
unknown keys are refused. The other functions read kv_connector_extra_config: of a MultiConnector
(`child_configs`), of every offloading medium (`offload_settings`), of host memory (`cpu_settings`),
of a disk (`disk_settings`) and of a Redis server (`remote_settings`, `remote_address`).
All raise ConfigError naming the key at fault.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from proto.errors import ConfigError
from proto.messages.kv_connector import LoadFailurePolicy
from proto.settings.json_flag import check_object, convert_object, flag_error, parse_json_flag

FIELD: Final = "kv_transfer_config"
CHILDREN_KEY: Final = "connectors"
"""Key of a MultiConnector's list of child configurations."""
CPU_SPEC: Final = "CPUOffloadingSpec"
DISK_SPEC: Final = "DiskOffloadingSpec"
REMOTE_SPEC: Final = "RemoteOffloadingSpec"
_SCHEMES: Final = ("redis", "rediss", "unix")
_REDIS_PORT: Final = 6379
_S = TypeVar("_S", bound=msgspec.Struct)


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's connector, or one child of a MultiConnector.

    kv_connector: name of a connector; "" for none.
    kv_connector_module_path: Python module of a connector that is not part of tokend; it defines
        the classes kv_connector + "Scheduler" and kv_connector + "Worker".
    kv_role: whether it stores (kv_producer), loads (kv_consumer) or does both.
    kv_load_failure_policy: whether a request whose load failed is recomputed or fails.
    """

    kv_connector: str = ""
    kv_connector_module_path: str = ""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_connector_extra_config: dict[str, Any] = {}
    kv_load_failure_policy: LoadFailurePolicy = "recompute"

    @property
    def loads(self) -> bool:
        """Whether requests may load KV through the connector."""
        return self.kv_role != "kv_producer"

    @property
    def stores(self) -> bool:
        """Whether computed KV is stored through the connector."""
        return self.kv_role != "kv_consumer"


NO_TRANSFER: Final = KVTransferConfig()


class OffloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the OffloadingConnector for every medium.

    spec_name: the medium. spec_module_path: Python module of a medium that is not part of tokend.
    block_size: tokens of an offloaded block, a multiple of the device's block size; 0: the same.
    store_threshold: lookups of a block before it is stored; 0 and 1 store every block.
    max_tracker_size: blocks whose lookups are counted.
    state_share: of the medium's bytes, for the states of a model with recurrent states; the rest is
        for KV. Without a meaning for a server, which evicts by itself.
    """

    spec_name: str = CPU_SPEC
    spec_module_path: str = ""
    block_size: int = 0
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    state_share: float = 0.5


class CPUSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of offloading to host memory.

    cpu_bytes_to_use: bytes of host memory of all ranks together. eviction_policy: which blocks are
    evicted first.
    """

    cpu_bytes_to_use: int
    eviction_policy: Literal["lru", "arc"] = "lru"


class DiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of offloading to a disk.

    disk_path: folder that only this user may write to, created if missing; for a folder that its
        group may write to, see `kv_media.own_folder`.
    disk_bytes_to_use: limit for all files in it.
    load_timeout, store_timeout: seconds after which a load or store fails, counted from its start.
    """

    disk_path: str
    disk_bytes_to_use: int
    load_timeout: float = 2.0
    store_timeout: float = 5.0


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of offloading to a Redis server.

    remote_url: redis://HOST:PORT/DB, rediss://… or unix:///PATH, without a password.
    remote_url_file: file that contains such a URL, which may include a password.
    remote_timeout: seconds to wait for a reply.
    remote_retry_seconds: pause after a failure; doubles up to sixteen times while failures go on.
    load_timeout, store_timeout: as for a disk.
    """

    remote_url: str | None = None
    remote_url_file: str | None = None
    remote_timeout: float = 0.5
    remote_retry_seconds: float = 2.0
    load_timeout: float = 2.0
    store_timeout: float = 5.0


class RemoteAddress(msgspec.Struct, frozen=True):
    """Address and credentials of a Redis server. path: of a Unix socket, else empty."""

    host: str
    port: int
    path: str
    tls: bool
    database: int
    username: str
    password: str

    def __repr__(self) -> str:
        """The address without credentials, for log and error messages."""
        return f"unix://{self.path}" if self.path else f"{self.host}:{self.port}"


def kv_transfer_config(text: str | None) -> KVTransferConfig:
    """Parse --kv-transfer-config, a JSON text."""
    if text is None:
        return NO_TRANSFER
    return _from_object(parse_json_flag(FIELD, text))


def _from_object(document: dict[str, Any]) -> KVTransferConfig:
    """Convert decoded JSON into the configuration of one connector."""
    config = convert_object(FIELD, document, KVTransferConfig)
    if not config.kv_connector:
        raise flag_error(FIELD, " needs kv_connector, the name of a connector")
    return config


def child_configs(config: KVTransferConfig) -> list[KVTransferConfig]:
    """Configurations of a MultiConnector's children, in the order given."""
    extra = config.kv_connector_extra_config
    documents = extra.get(CHILDREN_KEY)
    if set(extra) != {CHILDREN_KEY} or not isinstance(documents, list) or not documents:
        raise ConfigError(
            f"{FIELD}: MultiConnector needs {CHILDREN_KEY}, a list of configurations, "
            "and nothing else",
            FIELD,
        )
    return [_from_object(check_object(FIELD, document)) for document in documents]


def offload_settings(
    extra: Mapping[str, Any],
    block_size: int,
    windows: Sequence[int | None],
    *,
    has_states: bool = False,
) -> tuple[OffloadSettings, int]:
    """Return the settings of every medium, and the number of device blocks in an offloaded block.

    block_size: tokens of a device block. windows: sliding windows of the KV cache groups, None for
    full attention. has_states: whether there is a group of recurrent states, too.
    """
    common = {key: extra[key] for key in OffloadSettings.__struct_fields__ if key in extra}
    settings = convert_by_key(common, OffloadSettings)
    size = settings.block_size or block_size
    if size < 1 or size % block_size:
        raise config_key_error(
            "block_size", f"must be a multiple of --block-size {block_size}, got {size}"
        )
    if has_states and size > block_size:
        # States are held at the ends of device blocks, where a larger block ends by chance.
        raise config_key_error(
            "block_size",
            f"must be --block-size {block_size} for a model with recurrent states, got {size}",
        )
    narrowest = min((window for window in windows if window is not None), default=None)
    if narrowest is not None and size > block_size and size >= narrowest:
        raise config_key_error(
            "block_size",
            f"must be less than the model's window of {narrowest} tokens, got {size}",
        )
    if settings.store_threshold < 0:
        raise config_key_error(
            "store_threshold", f"must be 0 or more, got {settings.store_threshold}"
        )
    if settings.max_tracker_size < 1:
        raise config_key_error(
            "max_tracker_size", f"must be 1 or more, got {settings.max_tracker_size}"
        )
    if not 0.0 < settings.state_share < 1.0:
        raise config_key_error(
            "state_share", f"must be more than 0 and less than 1, got {settings.state_share}"
        )
    return settings, size // block_size


def cpu_settings(extra: Mapping[str, Any]) -> CPUSettings:
    own = {
        key: value for key, value in extra.items() if key not in OffloadSettings.__struct_fields__
    }
    if unknown := sorted(own.keys() - set(CPUSettings.__struct_fields__)):
        known = [*CPUSettings.__struct_fields__, *OffloadSettings.__struct_fields__]
        raise config_key_error(unknown[0], f"is not known; there are {', '.join(known)}")
    if "cpu_bytes_to_use" not in own:
        raise config_key_error(
            "cpu_bytes_to_use", f"is needed by {CPU_SPEC}: bytes of memory, of all ranks"
        )
    return convert_by_key(own, CPUSettings)


def disk_settings(extra: Mapping[str, Any]) -> DiskSettings:
    settings = _convert(DISK_SPEC, extra, DiskSettings)
    if not os.path.isabs(settings.disk_path):
        raise config_key_error("disk_path", f"must be an absolute path, got {settings.disk_path!r}")
    if settings.disk_bytes_to_use < 1:
        raise config_key_error(
            "disk_bytes_to_use", f"must be at least 1, got {settings.disk_bytes_to_use}"
        )
    _check_seconds(load_timeout=settings.load_timeout, store_timeout=settings.store_timeout)
    return settings


def remote_settings(extra: Mapping[str, Any]) -> RemoteSettings:
    settings = _convert(REMOTE_SPEC, extra, RemoteSettings)
    _check_seconds(
        load_timeout=settings.load_timeout,
        store_timeout=settings.store_timeout,
        remote_timeout=settings.remote_timeout,
        remote_retry_seconds=settings.remote_retry_seconds,
    )
    if (settings.remote_url is None) == (settings.remote_url_file is None):
        raise config_key_error("remote_url", "or remote_url_file is needed, and not both")
    if settings.remote_url is not None and _parse_url("remote_url", settings.remote_url).password:
        raise config_key_error(
            "remote_url", "must not have a password, which other users could read"
        )
    return settings


def remote_address(settings: RemoteSettings) -> RemoteAddress:
    """Parse the URL of the Redis server, read from its file if need be.

    Error messages never include the contents of the file.
    """
    if settings.remote_url is not None:
        return _parse_url("remote_url", settings.remote_url)
    assert settings.remote_url_file is not None, "remote_settings() checks it"
    try:
        with open(settings.remote_url_file, encoding="utf-8") as stream:
            url = stream.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise config_key_error("remote_url_file", f"{settings.remote_url_file}: {reason}") from None
    return _parse_url("remote_url_file", url)


def config_key_error(key: str, what: str) -> ConfigError:
    """Make the error about one key of kv_connector_extra_config."""
    return ConfigError(f"--kv-transfer-config: kv_connector_extra_config.{key} {what}")


def convert_by_key(values: Mapping[str, Any], kind: type[_S]) -> _S:
    """Convert key by key, so that the error names the key."""
    for key, value in values.items():
        field_type = next(
            field.type for field in msgspec.structs.fields(kind) if field.encode_name == key
        )
        try:
            msgspec.convert(value, field_type)
        except msgspec.ValidationError as error:
            raise config_key_error(key, f"is wrong: {error}") from None
    return msgspec.convert(values, kind)


def _convert(spec: str, extra: Mapping[str, Any], kind: type[_S]) -> _S:
    known = {key: extra[key] for key in kind.__struct_fields__ if key in extra}
    for key in extra:
        if key not in known and key not in OffloadSettings.__struct_fields__:
            raise config_key_error(
                key, f"is not known to {spec}; it has {', '.join(kind.__struct_fields__)}"
            )
    try:
        return msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--kv-transfer-config: kv_connector_extra_config of {spec}: {error}"
        ) from None


def _parse_url(key: str, url: str) -> RemoteAddress:
    try:
        parts = urlsplit(url)
        port = parts.port or _REDIS_PORT
    except ValueError:
        raise config_key_error(key, "is not a URL") from None
    unix = parts.scheme == "unix"
    if parts.scheme not in _SCHEMES or not (parts.path if unix else parts.hostname):
        raise config_key_error(
            key, "must be redis://HOST:PORT/DATABASE, rediss://… or unix:///PATH"
        )
    database = "" if unix else parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        raise config_key_error(key, "names a database that is no number")
    return RemoteAddress(
        host=parts.hostname or "",
        port=port,
        path=parts.path if unix else "",
        tls=parts.scheme == "rediss",
        database=int(database or 0),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )


def _check_seconds(**values: float) -> None:
    for key, value in values.items():
        if not 0.0 < value < 3600.0:
            raise config_key_error(
                key, f"must be more than 0 and less than 3600 seconds, got {value}"
            )

"""Settings of the PeerConnector, and `kv_transfer_params`, by which requests use it."""

import ipaddress
import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from proto.codec import to_compact_json, to_json_line
from proto.errors import InvalidRequestError, shown
from proto.messages.kv_peer import PeerSource, PeerWorkerAddress
from proto.settings.kv_transfer_config import (
    KVTransferConfig,
    child_configs,
    config_key_error,
    convert_by_key,
)

PEER: Final = "PeerConnector"
MULTI: Final = "MultiConnector"
PARAMS: Final = "kv_transfer_params"
_MIN_KEY_BYTES: Final = 16
_MAX_RANKS: Final = 256
_ID_CHARACTERS: Final = 32


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the PeerConnector.

    transport: how blocks travel: by TCP, or through shared memory between daemons of one user on
        one host.
    host: IP address that workers of a producer listen on, and that its answers name.
    port: the first of MAX_PORTS that a worker tries to listen on; 0: any free port.
    peers: IP addresses of producers that a consumer connects to.
    socket_folder: of the workers' Unix sockets, for shared memory; the same for both daemons.
    key_file: a file with a secret of both daemons, of at least 16 bytes; TCP needs one.
    lease_seconds: for which KV is kept for a consumer that is not heard from.
    load_timeout: seconds after which a load fails, including its time in the queue.
    """

    transport: Literal["tcp", "memory"] = "tcp"
    host: str = "127.0.0.1"
    port: int = 0
    peers: tuple[str, ...] = ("127.0.0.1", "::1")
    socket_folder: str | None = None
    key_file: str | None = None
    lease_seconds: float = 30.0
    load_timeout: float = 30.0


def peer_settings(extra: Mapping[str, Any]) -> PeerSettings:
    """Return the settings; raises ConfigError naming the wrong key.

    TCP needs a key also on loopback: another user of the host could otherwise listen in place of a
    producer, and a client's request would load wrong KV from there.
    """
    known = PeerSettings.__struct_fields__
    if unknown := sorted(set(extra) - set(known)):
        raise config_key_error(unknown[0], f"is not known; there are {', '.join(known)}")
    settings = convert_by_key(extra, PeerSettings)
    for key, addresses in (("host", [settings.host]), ("peers", settings.peers)):
        for address in addresses:
            try:
                is_unspecified = ipaddress.ip_address(address).is_unspecified
            except ValueError:
                raise config_key_error(key, f"is no IP address: {shown(address)}") from None
            if is_unspecified:
                raise config_key_error(key, f"{address} names no host: give one address of it")
    if not 0 <= settings.port < 1 << 16:
        raise config_key_error("port", f"must be between 0 and 65535, got {settings.port}")
    for key in ("lease_seconds", "load_timeout"):
        seconds = getattr(settings, key)
        if not 0.0 < seconds < 3600.0:
            raise config_key_error(
                key, f"must be more than 0 and less than 3600 seconds, got {seconds}"
            )
    if settings.transport == "tcp" and settings.key_file is None:
        raise config_key_error(
            "key_file", f"is needed by tcp: a file with a secret of at least {_MIN_KEY_BYTES} bytes"
        )
    if settings.transport == "memory" and not os.path.isabs(settings.socket_folder or ""):
        raise config_key_error("socket_folder", "is needed by memory: an absolute path")
    return settings


def read_key(settings: PeerSettings) -> bytes:
    """Return the secret of both daemons; empty without a file. Raises ConfigError."""
    if settings.key_file is None:
        return b""
    try:
        with open(settings.key_file, "rb") as stream:
            key = stream.read(4096).strip()
    except OSError as error:
        raise config_key_error("key_file", f"{settings.key_file}: {error.strerror}") from None
    if len(key) < _MIN_KEY_BYTES:
        raise config_key_error("key_file", f"needs {_MIN_KEY_BYTES} bytes, has {len(key)}")
    return key


Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
NumRanks = Annotated[int, msgspec.Meta(ge=1, le=_MAX_RANKS)]


class RemoteWorker(msgspec.Struct, frozen=True):
    """An entry of `remote_workers`. id: of the worker. port: its TCP port, 0 without one."""

    id: str
    port: Port


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params` of a request, and of the answer of a producer; fields as in vLLM.

    do_remote_decode: compute the prompt and keep its KV for another daemon. do_remote_prefill: load
        the KV that another daemon has computed; the other fields are those of its answer.
    remote_block_ids: by KV cache group, the producer's blocks; 0 where a window has passed.
    remote_engine_id, remote_request_id: random. remote_port: of the first worker.
    tp_size: number of remote_workers, which only tokend has: one for each rank.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: Port | None = None
    remote_block_ids: list[list[BlockId]] | None = None
    tp_size: NumRanks | None = None
    remote_workers: list[RemoteWorker] | None = None

    @property
    def source(self) -> PeerSource:
        """The producer; only of checked parameters with do_remote_prefill."""
        workers = [PeerWorkerAddress(each.id, each.port) for each in self.remote_workers or ()]
        return PeerSource(self.remote_request_id or "", self.remote_host or "", workers)


def transfer_params(params: Mapping[str, Any]) -> TransferParams:
    """Check the values of `kv_transfer_params`; raises InvalidRequestError naming the field.

    Fields that only other servers have are skipped.
    """
    try:
        found = msgspec.convert(params, TransferParams)
    except msgspec.ValidationError as error:
        raise _error(f": {shown(error)}") from None
    if found.do_remote_prefill and found.do_remote_decode:
        raise _error(" has both do_remote_prefill and do_remote_decode: a request has one of them")
    if not found.do_remote_prefill:
        return found
    needed = ("remote_engine_id", "remote_request_id", "remote_host", "remote_block_ids")
    for name in (*needed, "remote_workers"):
        if getattr(found, name) is None:
            raise _error(f".{name} is missing: it is part of the answer to the prefill")
    for name in ("remote_engine_id", "remote_request_id"):
        if not _is_id(getattr(found, name)):
            raise _error(f".{name} was not made by tokend: {shown(getattr(found, name))}")
    if not (found.remote_host or "").isascii():
        raise _error(f".remote_host is no IP address: {shown(found.remote_host)}")
    workers = found.remote_workers or []
    if not 1 <= len(workers) <= _MAX_RANKS:
        raise _error(f".remote_workers must have 1 to {_MAX_RANKS} workers, got {len(workers)}")
    if found.tp_size not in (None, len(workers)):
        raise _error(f".tp_size is {found.tp_size}, remote_workers has {len(workers)}")
    for worker in workers:
        if not _is_id(worker.id):
            raise _error(f".remote_workers: {shown(worker.id)} was not made by tokend")
    return found


def transfer_request(config: KVTransferConfig, params: Mapping[str, Any]) -> bytes:
    """Return what the daemon's connector gets of `kv_transfer_params`, as JSON.

    Empty for parameters that ask for nothing. A connector from outside gets and checks any. Raises
    InvalidRequestError without a connector that takes them, or in the wrong role.
    """
    if not params:
        return b""
    is_outside = config.kv_connector and config.kv_connector not in _OWN
    if config.kv_connector_module_path or is_outside:
        try:
            return to_compact_json(params)
        except OverflowError:
            raise _error(" has a number of more than 64 bits") from None
    parts = child_configs(config) if config.kv_connector == MULTI else [config]
    peer = next((each for each in parts if each.kv_connector == PEER), None)
    if peer is None:
        raise _error(f" needs a server whose --kv-transfer-config has a {PEER}")
    found = transfer_params(params)
    if found.do_remote_decode:
        if not peer.stores:
            raise _error(f".do_remote_decode: this server is a {peer.kv_role}, which keeps no KV")
        return to_json_line(TransferParams(do_remote_decode=True))
    if not found.do_remote_prefill:
        return b""
    if not peer.loads:
        raise _error(f".do_remote_prefill: this server is a {peer.kv_role}, which loads no KV")
    settings = peer_settings(peer.kv_connector_extra_config)
    if settings.transport == "tcp" and found.remote_host not in settings.peers:
        raise _error(f".remote_host {shown(found.remote_host)} is none of this server's peers")
    return to_json_line(found)


_OWN: Final = (MULTI, PEER, "OffloadingConnector", "SharedStorageConnector")


def _is_id(name: str) -> bool:
    return len(name) == _ID_CHARACTERS and not set(name) - set("0123456789abcdef")


def _error(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAMS}{what}", PARAMS)

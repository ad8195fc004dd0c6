"""What kv_connector_extra_config says to both halves of the offloading connector.

Knows the keys that concern every medium and those of host memory; a medium of another spec
reads its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from proto.errors import ConfigError
from proto.kv_transfer_config import FIELD

CPU_SPEC: Final = "CPUOffloadingSpec"
_S = TypeVar("_S", bound=msgspec.Struct)


class OffloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """spec_name: of the medium. spec_module_path: module of one that does not come with tokend.

    block_size: tokens of an offloaded block, a multiple of the device's blocks; 0 for the same.
    store_threshold: a block is stored once it was looked for so often; 0 and 1 store all.
    max_tracker_size: blocks that are counted for that.
    """

    spec_name: str = CPU_SPEC
    spec_module_path: str = ""
    block_size: int = 0
    store_threshold: int = 0
    max_tracker_size: int = 64_000


class CPUSettings(msgspec.Struct, frozen=True, kw_only=True):
    """cpu_bytes_to_use: host memory of all ranks together. eviction_policy: who goes first."""

    cpu_bytes_to_use: int
    eviction_policy: Literal["lru", "arc"] = "lru"


def offload_settings(
    extra: Mapping[str, Any], block_size: int, windows: Sequence[int | None]
) -> tuple[OffloadSettings, int]:
    """The settings, and how many device blocks an offloaded one has.

    block_size: tokens of a device block. windows: of the KV cache groups, None for full attention.
    Raises ConfigError naming the key at fault.
    """
    common = {key: extra[key] for key in OffloadSettings.__struct_fields__ if key in extra}
    settings = _converted(common, OffloadSettings)
    size = settings.block_size or block_size
    if size < 1 or size % block_size:
        raise wrong("block_size", f"must be a multiple of --block-size {block_size}, got {size}")
    narrowest = min((window for window in windows if window is not None), default=None)
    if narrowest is not None and size > block_size and size >= narrowest:
        raise wrong(
            "block_size",
            f"must be less than the model's window of {narrowest} tokens, got {size}",
        )
    if settings.store_threshold < 0:
        raise wrong("store_threshold", f"must be 0 or more, got {settings.store_threshold}")
    if settings.max_tracker_size < 1:
        raise wrong("max_tracker_size", f"must be 1 or more, got {settings.max_tracker_size}")
    return settings, size // block_size


def cpu_settings(extra: Mapping[str, Any]) -> CPUSettings:
    """What concerns host memory; raises ConfigError naming the key, one that nobody knows too."""
    own = {key: each for key, each in extra.items() if key not in OffloadSettings.__struct_fields__}
    if strange := sorted(own.keys() - set(CPUSettings.__struct_fields__)):
        known = [*CPUSettings.__struct_fields__, *OffloadSettings.__struct_fields__]
        raise wrong(strange[0], f"is not known; there are {', '.join(known)}")
    if "cpu_bytes_to_use" not in own:
        raise wrong("cpu_bytes_to_use", f"is needed by {CPU_SPEC}: bytes of memory, of all ranks")
    return _converted(own, CPUSettings)


def wrong(key: str, what: str) -> ConfigError:
    """The error about one key."""
    return ConfigError(f"--kv-transfer-config: kv_connector_extra_config.{key} {what}", FIELD)


def _converted(values: Mapping[str, Any], kind: type[_S]) -> _S:
    """Key by key, so that the message can name it."""
    for key, value in values.items():
        field_type = next(
            each.type for each in msgspec.structs.fields(kind) if each.encode_name == key
        )
        try:
            msgspec.convert(value, field_type)
        except msgspec.ValidationError as error:
            raise wrong(key, f"is wrong: {error}") from None
    return msgspec.convert(values, kind)

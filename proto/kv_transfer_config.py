"""What --kv-transfer-config says: which KV connector there is, and how it is set.

Keys are those of vLLM's option of that name, as far as they mean anything here; any other is
refused by name. What is in kv_connector_extra_config is read by the connector alone.
"""

from typing import Any, Final, Literal

import msgspec

from proto.errors import ConfigError, shown
from proto.kv_transfer import LoadFailurePolicy

FIELD: Final = "kv_transfer_config"


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The connector of a daemon, or (inside a MultiConnector) one of several.

    kv_connector: name of a connector; "" for none.
    kv_connector_module_path: Python module of one that does not come with tokend: there, its
        halves are the classes kv_connector + "Scheduler" and kv_connector + "Worker".
    kv_role: whether it stores (kv_producer), loads (kv_consumer) or does both.
    kv_load_failure_policy: what becomes of a request whose KV could not be loaded.
    """

    kv_connector: str = ""
    kv_connector_module_path: str = ""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_connector_extra_config: dict[str, Any] = {}
    kv_load_failure_policy: LoadFailurePolicy = "recompute"

    @property
    def loads(self) -> bool:
        """Whether requests may begin with KV from elsewhere."""
        return self.kv_role != "kv_producer"

    @property
    def stores(self) -> bool:
        """Whether KV is to be kept elsewhere."""
        return self.kv_role != "kv_consumer"


NO_TRANSFER: Final = KVTransferConfig()


def kv_transfer_config(text: str | None) -> KVTransferConfig:
    """The configuration in a JSON text; raises ConfigError naming the key at fault."""
    if text is None:
        return NO_TRANSFER
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _wrong(f"takes JSON: {error}") from None
    return from_document(document)


def from_document(document: Any) -> KVTransferConfig:
    """The same from what JSON says; for the parts of a connector that consists of others."""
    if not isinstance(document, dict):
        raise _wrong(f"takes a JSON object, got {shown(document)}")
    known = KVTransferConfig.__struct_fields__
    if strange := sorted(set(document) - set(known)):
        raise _wrong(f"has no {', '.join(map(shown, strange))}; it has {', '.join(known)}")
    try:
        config = msgspec.convert(document, KVTransferConfig)
    except msgspec.ValidationError as error:
        raise _wrong(shown(error)) from None
    if not config.kv_connector:
        raise _wrong("needs kv_connector, the name of a connector")
    return config


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"--kv-transfer-config {what}", FIELD)

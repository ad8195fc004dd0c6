"""Which connectors a MultiConnector consists of, for both of its halves."""

from proto.errors import ConfigError
from proto.kv_transfer_config import FIELD, KVTransferConfig, from_document

KEY = "connectors"


def children_of(config: KVTransferConfig) -> list[KVTransferConfig]:
    """Those named in kv_connector_extra_config, in order; raises ConfigError."""
    extra = config.kv_connector_extra_config
    documents = extra.get(KEY)
    if set(extra) != {KEY} or not isinstance(documents, list) or not documents:
        raise ConfigError(
            f"{FIELD}: MultiConnector needs {KEY}, a list of configurations, and nothing else",
            FIELD,
        )
    return [from_document(each) for each in documents]

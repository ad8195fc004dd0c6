"""Configuration of KV events: --kv-events-config, whose keys are those of vLLM's option."""

import os
import re
from functools import lru_cache
from typing import Final, Literal

import msgspec

from proto.settings.json_flag import convert_object, flag_error, parse_json_flag

FIELD: Final = "kv_events_config"
MAX_TOPIC_BYTES: Final = 256
MAX_PORT: Final = 65535


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine publishes its KV events.

    enable_kv_cache_events: whether they are published at all.
    publisher: "zmq", or "null" for none; by default as `enable_kv_cache_events` says.
    endpoint: of the PUB socket, which is always bound: tcp://HOST:PORT (HOST * for all interfaces,
        PORT 0 for a free one), ipc:///PATH, or ipc for a socket in the daemon's run directory; of
        engine 0, see `of_engine`.
    replay_endpoint: of the ROUTER socket that sends batches again; the same forms, None for none.
    buffer_steps: batches kept for it.
    hwm: batches that wait for a slow subscriber; it loses further ones.
    max_queue_size: of vLLM; ignored, because batches go to the socket at once.
    topic: first frame of each message, which subscribers filter by.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def endpoints(self) -> list[tuple[str, str]]:
        """(key, endpoint) of each socket."""
        found = [("endpoint", self.endpoint)]
        if self.replay_endpoint is not None:
            found.append(("replay_endpoint", self.replay_endpoint))
        return found

    def of_engine(self, engine: int) -> "KVEventsConfig":
        """Return the configuration of the engine with this index, whose endpoints are its own.

        Ports count on as in vLLM; a path gets a suffix. Port 0 and `ipc` differ by themselves.
        """
        if not engine:
            return self
        own = {}
        for key, endpoint in self.endpoints:
            start, _, port = endpoint.rpartition(":")
            if endpoint.startswith("ipc:"):
                own[key] = f"{endpoint}_dp{engine}"
            elif endpoint.startswith("tcp:") and port != "0":
                own[key] = f"{start}:{int(port) + engine}"
        return msgspec.structs.replace(self, **own)

    def check_engines(self, num_engines: int) -> None:
        """Raise ConfigError if the endpoints of all engines are not different ports."""
        ports = [
            range(port, port + num_engines)
            for _, endpoint in self.endpoints
            if endpoint.startswith("tcp:") and (port := int(endpoint.rpartition(":")[2]))
        ]
        engines = f"of {num_engines} engines (--data-parallel-size)"
        if any(each[-1] > MAX_PORT for each in ports):
            raise flag_error(FIELD, f": the ports {engines} go beyond {MAX_PORT}")
        if len(ports) == 2 and abs(ports[0].start - ports[1].start) < num_engines:
            raise flag_error(
                FIELD,
                f": the ports {engines} overlap: {ports[0].start} to {ports[0][-1]} of endpoint, "
                f"{ports[1].start} to {ports[1][-1]} of replay_endpoint",
            )

    @property
    def is_fixed(self) -> bool:
        """Whether only one engine at a time can bind the endpoints."""
        return any(
            endpoint != "ipc" and not re.fullmatch("tcp://.*:0", endpoint)
            for _, endpoint in self.endpoints
        )


@lru_cache
def kv_events_config(text: str | None) -> KVEventsConfig | None:
    """Parse --kv-events-config, a JSON text; None if no events are published.

    Raises ConfigError naming the key at fault.
    """
    if text is None:
        return None
    config = convert_object(FIELD, parse_json_flag(FIELD, text), KVEventsConfig)
    if config.publisher is None:
        publisher: Literal["zmq", "null"] = "zmq" if config.enable_kv_cache_events else "null"
        config = msgspec.structs.replace(config, publisher=publisher)
    for key, endpoint in config.endpoints:
        if not re.fullmatch(r"ipc|ipc:///.+|tcp://[^/\s]+:[0-9]+", endpoint):
            raise flag_error(
                FIELD, f": {key} takes ipc, ipc:///PATH or tcp://HOST:PORT, got {endpoint!r}"
            )
    if config.replay_endpoint == config.endpoint != "ipc" and not config.endpoint.endswith(":0"):
        raise flag_error(FIELD, f": replay_endpoint is that of endpoint, {config.endpoint}")
    for key in ("buffer_steps", "hwm", "max_queue_size"):
        value = getattr(config, key)
        if not 1 <= value <= 10_000_000:
            raise flag_error(FIELD, f": {key} must be in [1, 10000000], got {value}")
    if len(os.fsencode(config.topic)) > MAX_TOPIC_BYTES:
        raise flag_error(FIELD, f": topic has at most {MAX_TOPIC_BYTES} bytes")
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None

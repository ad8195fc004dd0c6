"""The contract between tokend's processes: messages, configuration, errors, sockets.

Owns every type that crosses a process boundary and every default value.
Knows nothing of scheduling, models or HTTP; imports only msgspec, zmq and, to
name processes, setproctitle.
"""

PROTOCOL_VERSION = 1
"""Exchanged in every handshake; processes of different versions refuse each other."""

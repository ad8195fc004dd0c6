"""Everything that crosses a process boundary: messages, configuration, errors, sockets.

All default values are defined here. Imports only msgspec, zmq and, for process titles,
setproctitle.
"""

PROTOCOL_VERSION = 1
"""Exchanged in every handshake; processes of different versions refuse each other."""

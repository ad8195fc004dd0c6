"""Identifiers that cross processes, and who mints them.

A *request id* is made by a front end and is unique over the run of the daemon:

    63      55 54          40 39                                0
    | client  | incarnation  | counter                          |

A *handle* is a 32-bit number minted by the engine at admission. Engine and
worker name a sequence only by its handle; a handle is never used twice within
an epoch. An *epoch* numbers one life of an engine, or
one pairing of it with its workers (see lifecycle/).
"""

from collections.abc import Iterator
from itertools import count

MAX_CLIENTS = 1 << 8
MAX_INCARNATIONS = 1 << 15


def request_ids(client_index: int, incarnation: int) -> Iterator[int]:
    """The request ids of one incarnation of one front end, in order.

    Raises ValueError for an index outside [0, 256) or an incarnation outside
    [0, 32768).
    """
    if not 0 <= client_index < MAX_CLIENTS:
        raise ValueError(f"client_index {client_index} is outside [0, {MAX_CLIENTS})")
    if not 0 <= incarnation < MAX_INCARNATIONS:
        raise ValueError(f"incarnation {incarnation} is outside [0, {MAX_INCARNATIONS})")
    return count((client_index << 55) | (incarnation << 40))

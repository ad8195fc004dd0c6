"""How a block is represented.

A block is an int: its index in the worker's KV buffer. What is known about it
lies in parallel lists indexed by that int (links in FreeQueue, reference counts
and hashes in BlockPool), so that a block table is already what the wire
carries and a pool of a million blocks adds no objects for the garbage
collector to walk.
"""

from typing import Final

NULL_BLOCK: Final = 0
"""A block that is never handed out, counted, cached or freed.

It fills table entries whose KV is not kept; its place in the free list is the
anchor that closes the ring.
"""

BlockIds = list[list[int]]
"""Block ids per KV group."""

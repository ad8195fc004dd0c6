"""How a block is represented: as an int, its index in the worker's KV buffer.

What is known about blocks lies in parallel lists indexed by this int: links and reference counts in
the free queue, hashes in the pool. So a block table has the form in which it is sent to workers,
and a pool of a million blocks adds no objects for the garbage collector.
"""

from typing import Final

NULL_BLOCK: Final = 0
"""A block that is never given away, counted, cached or freed.

It fills entries of block tables whose KV is not kept, and closes the ring of the free queue.
"""

BlockIds = list[list[int]]
"""Block ids per KV cache group."""

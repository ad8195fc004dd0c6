"""How FlashInfer 0.6.18 schedules attention: the memory it takes, and where decodes are split.

A block of threads attends for a tile: query rows of one KV head, over a chunk of a sequence's
pages. The library chooses one size of chunks for a batch, so that there are no more tiles than two
per multiprocessor and KV head (scheduler.cuh, PrefillBinarySearchKVChunkSize). A batch of more
rows than that is not split, and a single block walks the longest sequence while the others are
idle. On an H100 with 8 KV heads that is a batch of 34:

    33 sequences of 512, one of 32,768      chunks of 2048 pages, one block per head walks them
    the same, chunks of 205 pages           ten blocks per head

The limit is not the kernels'. A graph is launched with a tile for each row and more to spare,
because the library rounds up as if rows could have several tokens: 79 tiles for 64 rows in groups
of 4. DecodeSplits gives unequal sequences the spare tiles, by naming the size of chunks itself
(`fixed_split_size`). A step takes no more launches and no more memory for it, because every graph
has the merge of partial results, and on the host at most some twenty operations on an array of
lengths. The other ways add launches to each layer: a second wrapper for the longest sequences one,
a sequence as several rows two, for the gather of queries and the merge.

Windows are part of the choice, and 8-bit KV and sinks change nothing in it. A prefix of cascade
attention is a plan of its own. The planner of latents balances by itself: it hands chunks of an
equal share of all tokens to the multiprocessor with the least work (MLAPlan).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from worker.attention.backend import AttentionShape
from worker.attention.kv_cache import Window
from worker.cuda.attention.paged_batch import Int32s

_TILES_PER_MULTIPROCESSOR: Final = 2
_LEAST_CHUNK: Final = 128
"""Tokens of the shortest chunk."""
_SLACK_BYTES: Final = 1 << 10
"""The library aligns what it takes."""


def workspace_bytes(
    shape: AttentionShape, num_multiprocessors: int, capture_sizes: Sequence[int]
) -> int:
    """Return the most bytes that partial results of split sequences take, in any plan.

    A batch is split into at most two tiles per multiprocessor, or into as many as a graph has,
    where every tile has a slot, split or not. Each row of a tile takes a float32 [head_dim] and a
    log-sum for each head. A plan fails where the workspace is too small.
    """
    rows = _workspace_rows(shape, num_multiprocessors, capture_sizes)
    return _SLACK_BYTES + 4 * shape.num_heads * rows * (shape.head_dim + 1)


class DecodeSplits:
    """Chooses chunks for the decodes of one KV cache group.

    capture_sizes: number of decodes of each captured graph; the same as for `workspace_bytes`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        block_size: int,
        window: Window,
        num_multiprocessors: int,
        capture_sizes: Sequence[int],
    ) -> None:
        self._group_size = shape.group_size
        self._tile = _tile_rows(shape)
        # Of each query there are as many tiles as its group of heads takes, nearly always one.
        self._tiles_of_query = -(-shape.group_size // self._tile)
        self._library_tiles = _most_tiles(shape, num_multiprocessors) // self._tiles_of_query
        self._workspace_tiles = (
            _workspace_rows(shape, num_multiprocessors, capture_sizes) // self._tile
        )
        self._least_chunk = max(_LEAST_CHUNK // block_size, 1)
        self._pages_in_window = (
            int(np.iinfo(np.int32).max)
            if window is None
            else -(-(window - 1 + self._tile) // block_size)
        )

    def chunk_pages(self, pages: Int32s) -> int | None:
        """Return the pages of a chunk, or None if the library's own choice is about as good.

        pages: int32 [R], of each sequence; 0 for padding. The chunk is the smallest that the spare
        tiles allow, but not smaller than the mean sequence, so that equal ones are not split. It is
        smaller than the longest sequence: a graph must never be planned without any split.
        """
        in_graph = _graph_tiles(len(pages), self._group_size, self._tile)
        most_tiles = min(in_graph, self._workspace_tiles) // self._tiles_of_query
        if most_tiles <= self._library_tiles:
            return None
        pages = np.minimum(pages, self._pages_in_window)
        mean = -(-int(pages.sum()) // max(1, int(np.count_nonzero(pages))))
        # The planner counts a sequence without pages as one of a page.
        pages = np.maximum(pages, 1)
        library_chunk = int(pages.max())
        if len(pages) <= self._library_tiles:
            library_chunk = _smallest_chunk(
                pages, self._library_tiles, self._least_chunk, library_chunk
            )
        least = max(self._least_chunk, mean)
        # What saves less than a ninth is not worth merging more results.
        greatest = library_chunk * 8 // 9
        if greatest < least or _num_tiles(pages, greatest) > most_tiles:
            return None
        return _smallest_chunk(pages, most_tiles, least, greatest)


def _smallest_chunk(pages: Int32s, most_tiles: int, least: int, greatest: int) -> int:
    """Return the smallest chunk from `least` with at most `most_tiles`, or else `greatest`.

    Chunks are numbers of pages. pages: int32 [R], of each sequence.
    """
    while least < greatest:
        middle = (least + greatest) // 2
        if _num_tiles(pages, middle) > most_tiles:
            least = middle + 1
        else:
            greatest = middle
    return least


def _num_tiles(pages: Int32s, chunk: int) -> int:
    """Return the tiles of sequences that are split into chunks of `chunk` pages."""
    return int((-(-pages // chunk)).sum())


def _graph_tiles(num_rows: int, group_size: int, tile: int) -> int:
    """Return the tiles that FlashInfer launches for a graph of num_rows decodes.

    From scheduler.cuh, PrefillSplitQOKVIndptr.
    """
    return -(-num_rows * group_size // tile) + num_rows - 1


def _most_tiles(shape: AttentionShape, num_multiprocessors: int) -> int:
    """Tiles into which the library splits a batch at most."""
    return _TILES_PER_MULTIPROCESSOR * num_multiprocessors // shape.num_kv_heads


def _workspace_rows(
    shape: AttentionShape, num_multiprocessors: int, capture_sizes: Sequence[int]
) -> int:
    """Rows of partial results that there is room for."""
    most_tiles, tile = _most_tiles(shape, num_multiprocessors), _tile_rows(shape)
    of_prefills = most_tiles * (64 if shape.head_dim >= 256 else 128)
    of_graphs = [
        tile * max(most_tiles, _graph_tiles(size, shape.group_size, tile)) for size in capture_sizes
    ]
    return max(of_prefills, *of_graphs) if of_graphs else of_prefills


def _tile_rows(shape: AttentionShape) -> int:
    """Rows of a tile of decodes, whose query heads are rows (FA2DetermineCtaTileQ)."""
    if shape.group_size > 64 and shape.head_dim < 256:
        return 128
    return 64 if shape.group_size > 16 else 16

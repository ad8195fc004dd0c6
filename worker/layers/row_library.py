"""Whose kernels do the small operations on a GPU: FlashInfer's where it is installed."""

import functools
import importlib.metadata
import logging

from worker.layers.flashinfer_rows import RowLibrary

VERSION = "0.6.18.post1"
"""The one that the code was written against; the same as in the extra `gpu`."""

logger = logging.getLogger("tokend.worker")


@functools.cache
def row_library() -> RowLibrary | None:
    """The library, or None for our own kernels; says which, once."""
    try:
        found = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        logger.info("norms and gates run on our own kernels: FlashInfer %s is needed", VERSION)
        return None
    import flashinfer

    logger.info("norms, gates and rotations run on FlashInfer")
    library: RowLibrary = flashinfer
    return library

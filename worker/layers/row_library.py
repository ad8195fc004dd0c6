"""The module flashinfer as it is imported, and whose kernels do the small operations on a GPU."""

import functools
import importlib.metadata
import logging
import os
from typing import Any

from worker.layers.flashinfer_rows import RowLibrary

VERSION = "0.6.18.post1"
"""The one that the code was written against; the same as in the extra `gpu`."""

logger = logging.getLogger("tokend.worker")


def installed_version() -> str | None:
    """The version of flashinfer-python that is installed; None where there is none."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def import_flashinfer() -> Any:
    """The module, whose norms are compiled by nvcc.

    Where the CuTe compiler (nvidia-cutlass-dsl) is installed the library would compile them with
    that instead, at the first step; it reads this variable when it is imported.
    """
    os.environ["FLASHINFER_USE_CUDA_NORM"] = "1"
    import flashinfer

    return flashinfer


@functools.cache
def row_library() -> RowLibrary | None:
    """FlashInfer where it is installed, or None for our own kernels; logs which, once."""
    if installed_version() != VERSION:
        logger.info("norms and gates run on our own kernels: FlashInfer %s is needed", VERSION)
        return None
    library: RowLibrary = import_flashinfer()
    logger.info("norms, gates and rotations run on FlashInfer")
    return library

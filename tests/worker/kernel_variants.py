"""The kernel libraries that this machine can run, for parametrised tests."""

from functools import cache

import pytest

from worker import kernels
from worker.build_kernels import (
    SOURCE_DIR,
    Variant,
    cpu_flags,
    machine_variants,
    usable_variants,
)
from worker.kernels import Kernels

LOADABLE = [
    each
    for each in usable_variants(machine_variants(), cpu_flags())
    if each.library(SOURCE_DIR).exists()
]
RUNNABLE = [pytest.param(each, id=each.name) for each in LOADABLE] or [
    pytest.param(None, marks=pytest.mark.skip(reason="no compiled kernels on this machine"))
]

each_variant = pytest.mark.parametrize("variant", RUNNABLE)


@cache
def load_variant(variant: Variant) -> Kernels:
    """The library of one variant, loaded once: its name has a digest of all its sources."""
    return kernels.load_variant(variant)

"""The kernel libraries that this machine can run, for parametrised tests."""

import pytest

from worker.build_kernels import SOURCE_DIR, cpu_flags, machine_variants, usable_variants
from worker.kernels import load_variant

RUNNABLE = [
    pytest.param(each, id=each.name)
    for each in usable_variants(machine_variants(), cpu_flags())
    if each.library(SOURCE_DIR).exists()
] or [pytest.param(None, marks=pytest.mark.skip(reason="no compiled kernels on this machine"))]

each_variant = pytest.mark.parametrize("variant", RUNNABLE)

__all__ = ["each_variant", "load_variant"]

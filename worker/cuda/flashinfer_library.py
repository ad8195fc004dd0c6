"""The library FlashInfer as tokend uses it: version, sizes, and the module of latent attention.

Imports neither the library nor the rest of the worker, so that images can compile its kernels
before they have the sources that change.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

VERSION: Final = "0.6.18.post1"
"""The one that the code was written against; the same as in the extra `gpu`."""
BACKEND: Final = "fa2"
"""Of attention, always named: on Hopper the library would choose itself, and plan longer."""
HEAD_DIMS: Final = (64, 128, 256)
LATENT_DIMS: Final = (512, 64)
"""Sizes of a latent and of the rotated part of a key that there are kernels for."""


def latent_module(dtype: "torch.dtype") -> Any:
    """Return the library's spec of the module of latent attention. Imports the library."""
    import torch
    from flashinfer.jit.attention.modules import gen_batch_mla_module

    return gen_batch_mla_module(BACKEND, dtype, dtype, dtype, torch.int32, *LATENT_DIMS, False)

"""What is installed, and what the device does at best."""

import importlib.metadata
import platform
from typing import Any

import torch

from tests.gpu.phases import demand
from tests.gpu.timing import CUDA, copy_rate, product_rate, read_rate
from worker.attention.flashinfer import load_library

PACKAGES = ("torch", "triton", "flashinfer-python", "apache-tvm-ffi", "transformers", "numpy")


def versions() -> dict[str, Any]:
    """Also loads the library, which needs no compiler for that."""
    load_library()
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["device"] = torch.cuda.get_device_name(CUDA)
    found["capability"] = list(torch.cuda.get_device_capability(CUDA))
    # Without it the bridge to the library compiles one at its first import.
    found["dlpack exchange"] = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    demand(torch.cuda.get_device_capability(CUDA) >= (8, 0), "needs compute capability 8.0")
    return found


def ceilings() -> dict[str, Any]:
    """Rates that the other phases are held against, each twice to show the spread."""
    return {
        "copy GB/s": [copy_rate() / 1e9 for _ in range(2)],
        "read GB/s": [read_rate() / 1e9 for _ in range(2)],
        "product TFLOP/s": [product_rate() / 1e12 for _ in range(2)],
    }

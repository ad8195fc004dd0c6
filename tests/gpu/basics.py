"""Installed versions, and the peak rates of the device."""

import importlib.metadata
import os
import platform
import shutil

import torch

from tests.gpu.hardware import hardware
from tests.gpu.report import Report, demand
from tests.gpu.timing import copy_rate, product_rate, read_rate

PACKAGES = ("torch", "triton", "flashinfer-python", "apache-tvm-ffi", "transformers", "numpy")
PROGRAMS = ("nvcc", "gcc", "ninja", "compute-sanitizer")
VARIABLES = ("FLASHINFER_DISABLE_JIT", "FLASHINFER_USE_CUDA_NORM")


def versions(report: Report) -> None:
    """Report versions; also loads the library, which needs no compiler."""
    gpu = hardware()
    report.figure("device", gpu.name())
    report.figure("capability", list(gpu.capability()))
    report.figure("python", platform.python_version())
    report.figure("cuda", torch.version.cuda)
    for name in PACKAGES:
        try:
            report.figure(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            report.figure(name, "not installed")
    for name in PROGRAMS:
        report.figure(name, shutil.which(name) or "not found")
    for name in VARIABLES:
        report.figure(name, os.environ.get(name, "not set"))
    # Otherwise the library's bridge compiles a module at its first import.
    report.figure("dlpack exchange", hasattr(torch.Tensor, "__dlpack_c_exchange_api__"))
    demand(gpu.capability() >= (8, 0), "needs compute capability 8.0")
    gpu.kernels().load_flashinfer()


def ceilings(report: Report) -> None:
    """Peak rates that the other phases are compared with, measured twice to show the spread."""
    gpu = hardware()
    report.figure("copy GB/s", [copy_rate(gpu) / 1e9 for _ in range(2)])
    report.figure("read GB/s", [read_rate(gpu) / 1e9 for _ in range(2)])
    report.figure("product TFLOP/s", [product_rate(gpu) / 1e12 for _ in range(2)])

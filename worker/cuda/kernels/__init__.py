"""Triton kernels. These files import Triton, and others import them inside functions."""

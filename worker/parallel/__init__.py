"""Tensor parallelism: how a model is divided among ranks, and how the ranks exchange tensors."""

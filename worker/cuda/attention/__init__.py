"""Attention on a GPU, by FlashInfer over the paged KV cache."""

"""Attention over the paged KV cache: one seam, several backends."""

"""Model families: what distinguishes them (`ModelSpec`) and the one decoder that runs them all.

Knows nothing of files, requests or KV pages.
"""

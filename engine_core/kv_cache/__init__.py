"""KV blocks of one engine: which request holds which, cached prefixes, free blocks.

Owns block ids, reference counts and the hash index. Knows block ids only: the
tensors are the worker's, the order of requests is the scheduler's. Other
folders use `manager`, `hashing` and `integrity`.
"""

"""KV blocks of one engine: who holds which, which prefixes they store, which are free.

Owns block ids, reference counts and the hash index. Knows block ids only: the
tensors are the worker's, the order of requests is the scheduler's. Other
folders use `manager`, `hashing` and `integrity`.
"""

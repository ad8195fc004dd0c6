"""KV cache of one engine: which request holds which blocks, cached prefixes, free blocks.

Only block ids are known here: the tensors are in the workers. Start reading at `manager.py`; other
folders use `manager`, `hashing` and `integrity`.
"""

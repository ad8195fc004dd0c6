"""The engine process: requests, queues, the scheduler and the bookkeeping of KV blocks.

It imports no torch and serves no HTTP. Start with `core.py`.
"""

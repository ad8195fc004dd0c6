"""Benchmarks of OpenAI-compatible servers: `tokend bench`.

They use only HTTP and /proc, so that the same code measures tokend and other servers.
"""

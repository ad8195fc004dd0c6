"""Load against an OpenAI-compatible server on this machine, and what it cost.

Knows the HTTP interface and /proc, nothing of tokend's insides, so that peers are
measured by the same code.
"""

"""Measures a daemon from outside: over HTTP what clients get, in /proc what it costs.

`python -m deploy.loadtest` starts a daemon of its own, loads it and prints a table.
"""

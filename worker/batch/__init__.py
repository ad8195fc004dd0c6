"""The state of sequences on the worker and the arrays of one step."""

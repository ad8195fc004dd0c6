"""Reload: replace engine and workers of a running daemon without losing a request."""

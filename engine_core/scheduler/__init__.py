"""Decides, step by step, what every request computes next."""

"""Copies between device blocks and a medium."""

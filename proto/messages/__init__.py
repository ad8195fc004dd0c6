"""Structs that cross from one process to another, and files that have such a format."""

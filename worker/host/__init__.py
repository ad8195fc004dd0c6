"""Devices that compute in the memory of the host: what a CPU and the reference have in common."""

"""What front ends are to be told."""

from proto.engine_io import EngineCoreOutput

ClientOutputs = dict[int, list[EngineCoreOutput]]
"""Outputs by client index."""

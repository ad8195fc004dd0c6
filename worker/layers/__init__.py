"""The parts of a decoder layer as small classes over plain tensors.

Knows nothing of model families, files or requests.
"""

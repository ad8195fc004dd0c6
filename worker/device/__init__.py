"""The device of a worker, a CPU or a CUDA GPU: its memory, and copies to it and from it."""

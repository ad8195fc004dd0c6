"""What a worker computes on: the CPU or one CUDA device, its memory, and the way of arrays there."""

"""What a worker computes on: CPU or CUDA device, its memory, and the way of arrays there."""

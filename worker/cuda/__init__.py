"""What computes on a CUDA GPU: FlashInfer, Triton, CUDA graphs and steps that are queued.

Start at device.py.
"""

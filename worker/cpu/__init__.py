"""What computes on a CPU: the C++ kernels of worker/csrc, where they are chosen, and their memory.

Start at device.py.
"""

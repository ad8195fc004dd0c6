"""The engine: which tokens of which requests are computed next, and where their KV lies.

Owns requests, queues, the scheduler and the KV block books. Knows nothing of
tensors, text or HTTP; imports no torch.
"""

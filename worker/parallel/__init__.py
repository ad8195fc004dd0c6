"""Workers that share each layer of one model: who has which part, and how they meet.

Owns the division of a model among ranks and the group through which they exchange what they
have computed. Knows nothing of requests, files or KV pages.
"""

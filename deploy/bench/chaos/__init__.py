"""`tokend bench chaos`: processes die under load, and what clients notice of it."""

"""`tokend bench soak`: many requests or many hours, and what grows meanwhile."""

"""Whether a model fits into memory, with which settings, and how fast it will be."""

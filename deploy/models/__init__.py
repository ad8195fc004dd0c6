"""Models: the packaged ones, and the preparation of any model for serving."""

"""The page at `/`: a playground and a live view of the engine, and the files they are made of."""

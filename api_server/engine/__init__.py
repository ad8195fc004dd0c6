"""The way to the engine: the connection, open requests, which survive its death, and health."""

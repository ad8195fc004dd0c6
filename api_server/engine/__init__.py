"""The way to the engine: open requests, the connection, and requests that survive its death."""

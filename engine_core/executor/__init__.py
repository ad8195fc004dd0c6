"""How the engine reaches its workers."""

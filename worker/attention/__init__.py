"""The interface of attention backends, and the memory that they read: KV pages and states."""

"""KV that agents keep between two turns: sessions, retained prefixes, the rule of their TTL."""

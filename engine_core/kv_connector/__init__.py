"""KV that lies outside the device: deciding what is loaded from there and what is stored."""

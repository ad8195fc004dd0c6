"""KV that lies outside the device: copying it there and back."""

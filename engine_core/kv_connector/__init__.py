"""KV connectors, scheduler's half: decide which KV is loaded from and stored outside the device."""

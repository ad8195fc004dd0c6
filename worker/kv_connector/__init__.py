"""KV connectors, workers' half: copy KV between the device and other media."""

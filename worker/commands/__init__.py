"""The program of a worker besides serving: `tokend plan`."""

"""The programs of a worker besides serving: `tokend plan`, `tokend bench products`."""

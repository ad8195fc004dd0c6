"""`tokend bench agents`: completion times of agents' jobs under each scheduling policy."""

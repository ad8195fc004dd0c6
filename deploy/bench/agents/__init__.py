"""`tokend bench agents`: what pins are worth to agents' jobs, simulated and with a model."""

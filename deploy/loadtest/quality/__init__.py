"""What a setting costs in quality: the log-probabilities it gives to texts beside exact ones."""

"""What the scheduler can do beyond steps of plain requests: one file for each feature."""

"""`tokend trace`: traces of the scheduler, looked at and played again."""

"""`tokend trace`: web pages of scheduler traces."""

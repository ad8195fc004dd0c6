"""`tokend bench overload`: more load than a daemon can take; refusals and their side effects."""

"""A package of parts for tokend, one of each kind, a module for each process that uses them."""

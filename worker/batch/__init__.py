"""The rows of running sequences, and the arrays of a step made of them."""

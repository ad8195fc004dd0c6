"""What a load asks: sessions of one request or of many that follow each other.

A data set is a recipe: the same seed gives the same requests, in whatever order they are sent.
"""

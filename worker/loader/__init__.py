"""From the files of a prepared model to a Decoder with its weights in place.

Owns file formats and tensor names; knows nothing of requests or KV pages.
"""

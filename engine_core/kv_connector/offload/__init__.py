"""Blocks that leave the device and come back: the ledger of what lies where."""

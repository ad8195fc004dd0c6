"""The parent of all processes of a daemon: starts, watches, restarts and stops them."""

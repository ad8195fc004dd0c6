"""The scheduler, measured: the parts that the daemon wires, without processes and sockets.

Plays the workloads that it is given and says how long the steps took. Knows nothing
of tables, rounds or peers.
"""

"""Measures a server through its real scheduler and executor processes, without a gateway."""

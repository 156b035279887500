"""Real processes over real sockets."""

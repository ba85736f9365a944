"""Control plane: tasks, sessions, leases and results."""

"""Durable store of the control plane: SQLite or PostgreSQL, with shared SQL."""

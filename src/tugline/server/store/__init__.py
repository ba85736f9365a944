"""Where the control plane keeps what it must not lose: SQLite or PostgreSQL, one set of SQL."""

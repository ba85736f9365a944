"""How the outcome of a session is judged."""

"""Translate between agents' APIs, chat templates and engines; pure functions, no I/O."""

"""Replay a recorded session with its real harness, or continue it live from any call."""

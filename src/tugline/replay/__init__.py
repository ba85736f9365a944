"""Replay a recorded session with its real harness, or fork it from any call."""

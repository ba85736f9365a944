"""Harnesses: agent programs, which run unmodified."""

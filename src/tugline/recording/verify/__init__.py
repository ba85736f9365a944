"""Judges recorded sessions, and makes their trajectories again, from segments alone."""

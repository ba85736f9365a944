"""Judges recorded sessions, and makes their trajectories again, from recordings alone."""

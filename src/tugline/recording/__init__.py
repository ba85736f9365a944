"""Recordings: the calls, events and result of a session, in one file."""

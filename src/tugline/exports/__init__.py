"""Exports: recorded sessions as files that other tools and trainers read."""

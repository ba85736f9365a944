"""Command line; one file per command or group of commands."""

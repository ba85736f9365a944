"""Nodes: they lease sessions from a server, run them on one machine and commit the results."""

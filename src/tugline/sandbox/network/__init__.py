"""Forwarded ports and the proxy: the only ways out of a sandbox."""

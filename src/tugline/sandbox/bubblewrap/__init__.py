"""Sandboxes of bubblewrap, without an image or a daemon."""

"""Workspaces: checked out once, shared, copied on write."""

"""One session from its task to its trajectory."""

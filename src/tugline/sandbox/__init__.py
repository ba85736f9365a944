"""Where agents run."""

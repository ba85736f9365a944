"""What runs: agent programs, unmodified."""

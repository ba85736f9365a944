"""What to ask an inference engine for, and where the token ids are in its answer. Pure."""

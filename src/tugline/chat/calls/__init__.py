"""Tool calls as model families write them: grammars from sampled text to name and arguments."""

"""Run programs in a sandbox: start them, copy their output, limit and end them."""

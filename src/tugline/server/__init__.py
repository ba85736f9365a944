"""The control plane: which sessions there are and what came of them."""

"""Wire formats of inference engines: build a request, read token ids from the reply. Pure."""

"""Does a harness, as its makers ship it, work here? Real programs against a scripted model."""

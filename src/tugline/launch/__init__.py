"""Assembly of server, node and engine, in one process or in several."""

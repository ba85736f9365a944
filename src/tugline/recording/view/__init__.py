"""Views of a recorded session: on a terminal, as an HTML page and as JSON."""

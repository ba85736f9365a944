"""View a recorded session: one value, shown on a terminal, as an HTML page or as JSON."""

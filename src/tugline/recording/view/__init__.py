"""Look into one recorded session: on a terminal, as JSON, or as one HTML page."""

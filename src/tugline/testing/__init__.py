"""Stand-ins for the parts of a real deployment, for tests of anything built on Tugline."""

"""The sessions of one machine: leased from a server, run, committed."""

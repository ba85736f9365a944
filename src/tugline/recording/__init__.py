"""Keep what was sampled: a growing answer becomes a `Call`, calls become a recording file."""

"""How programs talk to a rollout server: trainers and people (`api`, `sync`), nodes (`nodes`)."""

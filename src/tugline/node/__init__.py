"""One rollout, from an empty folder to a trajectory."""

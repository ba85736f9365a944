"""Memory, time and cost of a training before it is started."""

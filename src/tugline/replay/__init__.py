"""A recorded session again: the real harness on recorded answers, and live from any turn on."""

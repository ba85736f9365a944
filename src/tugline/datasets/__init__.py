"""Task sets: a benchmark's own files on one side, tasks on the other."""

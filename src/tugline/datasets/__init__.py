"""Task sets: convert the files of benchmarks to tasks."""

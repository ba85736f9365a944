"""The quickstart: a tiny model learns real tasks through a real agent harness, on a laptop."""

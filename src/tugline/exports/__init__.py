"""Export recorded sessions to files of other tools and trainers."""

"""States of the parser of answers, and what they collect."""

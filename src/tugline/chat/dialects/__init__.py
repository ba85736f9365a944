"""The wire languages harnesses speak; one class each owns all that is known about it."""

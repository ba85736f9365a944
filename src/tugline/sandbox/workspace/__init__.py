"""What a box begins with: made once, shared, copied on write."""

"""What a running engine is good for: ask it, judge what it says, refuse what would be false."""

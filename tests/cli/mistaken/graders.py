def score(outcome: object) -> float:
    """Pass everything."""
    return float(outcome is not None)

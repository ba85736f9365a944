"""Verify recorded sessions from their recordings alone, or against an engine."""

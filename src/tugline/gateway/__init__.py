"""Model calls from harness to engine and back, recorded as they happen."""

"""Sessions as OpenTelemetry spans, exported after a session has ended."""

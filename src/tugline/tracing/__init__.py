"""What a session did, as spans of OpenTelemetry; told when it is over, so that no call waits."""

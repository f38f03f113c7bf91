"""What the server writes about requests for those who run it: the access log, and spans of OpenTelemetry."""

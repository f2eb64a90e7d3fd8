"""Traces, logs and metrics; the only door to the OpenTelemetry SDK."""

"""The service: engine thread, HTTP API, metrics, dashboard, and when to train."""

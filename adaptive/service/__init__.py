"""The service: the engine thread, the HTTP API, metrics, the dashboard, and the schedule of training."""

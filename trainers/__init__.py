"""Offline training: records become a dataset, a dataset becomes an adapter, and the gate decides on its promotion."""

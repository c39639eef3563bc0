"""Offline path: records become a dataset, a dataset becomes an adapter, the gate decides."""

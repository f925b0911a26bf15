"""Metrics, trackers, heartbeats, flight recorder, probes and profiling of a run."""

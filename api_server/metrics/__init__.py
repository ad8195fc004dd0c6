"""Counters, gauges and histograms of /metrics, shared between front ends."""

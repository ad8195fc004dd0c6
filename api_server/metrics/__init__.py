"""Counters, gauges and histograms of /metrics, shared between API servers."""

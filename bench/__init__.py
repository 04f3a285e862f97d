"""Benchmarks: each prints progress on stderr and one JSON object as its last line on stdout."""

"""Servers of this machine as processes, and turns of rates: for the benchmarks that compare."""

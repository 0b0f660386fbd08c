"""Parts of the measurements of speculation, benchmarks/speculation_*.py."""

"""Published measurements as rows to predict, for `benchmarks/published.py`: none is of this project."""

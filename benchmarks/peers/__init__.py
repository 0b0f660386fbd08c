"""Parts of benchmarks/cpu_peers.py: checkpoints, environments, one worker for each engine, and the report."""

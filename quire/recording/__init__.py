"""Recording what an engine was asked and decided, and replaying it."""

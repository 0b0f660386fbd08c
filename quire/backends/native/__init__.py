"""The native backend: programs run by the C++ core, a whole step in one call."""

"""The native backend: runs programs in the C++ core, a whole step per call."""

"""Simulation: the live scheduler and engine on a virtual clock, with steps as long as a law says."""

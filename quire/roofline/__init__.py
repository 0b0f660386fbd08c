"""The roofline: the measured ceilings of this machine, to compare actual rates with."""

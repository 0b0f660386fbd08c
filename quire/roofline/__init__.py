"""The roofline: what this machine can do, to hold against what was done."""

"""Drafting from texts: what followed the last tokens of a sequence before, in its text or earlier answers."""

"""Several models in one server: each is loaded when it is first asked for, and unloaded when not in use."""

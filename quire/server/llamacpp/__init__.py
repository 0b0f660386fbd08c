"""llama.cpp's own endpoints, for clients that speak no other."""

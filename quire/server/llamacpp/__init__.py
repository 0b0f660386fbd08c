"""llama.cpp's own endpoints, for clients that support no other."""

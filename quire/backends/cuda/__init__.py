"""The backend on NVIDIA GPUs: Triton kernels compiled ahead of time, launched through cuda-core."""

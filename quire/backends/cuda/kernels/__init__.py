"""The Triton kernels, one file a concept. They import nothing but Triton, and `variants` not even that.

Each docstring gives a kernel's arguments, its bytes and operations, and why its sums have one order: that of
a single row, whatever the tile, the number of programs and the other rows. All arguments are pointers, 32-bit
integers, float32 numbers or constants (upper case). Kernels are compiled without fusion of multiply-adds;
where one rounding is meant, they say `tl.fma`.
"""

// What this machine can do at most: loops of the very instructions that kernels use, and of loads.
#pragma once

#include <string>
#include <vector>

#include "thread_pool.h"

namespace quire {

// Operations a second of all threads together, multiply-adds counted as two. `kind` is "f32", "bf16" or
// "int8"; 0 where the instruction set has no instruction for it that is faster than f32's. Both functions
// throw std::invalid_argument for an instruction set that this machine cannot run.
double peak_operations(ThreadPool& pool, const std::string& isa, const std::string& kind, double seconds);

// Bytes a second that all threads together read from buffers of `bytes` each.
double read_bandwidth(ThreadPool& pool, const std::string& isa, size_t bytes, double seconds);

}  // namespace quire

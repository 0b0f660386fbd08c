// Peak rates of this machine, measured by loops of the instructions that kernels use, and of loads.
#pragma once

#include <string>
#include <vector>

#include "thread_pool.h"

namespace quire {

// Returns operations per second of all threads together, counting a multiply-add as two. `kind` is "f32",
// "bf16" or "int8"; 0 if the instruction set has no instruction for it that is faster than that of f32. Both
// functions throw std::invalid_argument for an instruction set that this machine cannot run.
double peak_operations(ThreadPool& pool, const std::string& isa, const std::string& kind, double seconds);

// Returns bytes per second read by all threads together, each from a buffer of `bytes`.
double read_bandwidth(ThreadPool& pool, const std::string& isa, size_t bytes, double seconds);

}  // namespace quire

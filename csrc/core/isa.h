// Selection of kernels by instruction set.
#pragma once

#include <string>
#include <vector>

#include "../kernels/kernels.h"

namespace quire {

// The kernels this machine can run, best first; the last one, portable C++, runs everywhere.
std::vector<const Kernels*> available_kernels();

// The kernels of this name. Throws std::invalid_argument if this machine cannot run them.
const Kernels& kernels_of(const std::string& isa);

}  // namespace quire

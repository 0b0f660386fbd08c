// The kernels that this machine can run.
#pragma once

#include <string>
#include <vector>

#include "../kernels/kernels.h"

namespace quire {

// Best first; the last one, portable C++, runs everywhere.
std::vector<const Kernels*> available_kernels();

// Those of this name. Throws std::invalid_argument where this machine cannot run them.
const Kernels& kernels_of(const std::string& isa);

}  // namespace quire

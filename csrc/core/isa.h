// The kernels that this machine can run.
#pragma once

#include <vector>

#include "../kernels/kernels.h"

namespace quire {

// Best first; the last one, portable C++, runs everywhere.
std::vector<const Kernels*> available_kernels();

}  // namespace quire

// The instruction sets with kernels in this build, and those that this machine can run.

#include "isa.h"

#include <stdexcept>

#include "isas.h"  // made by CMakeLists.txt: QUIRE_ISAS(X) is X(name) for each instruction set, best first
#include "runs_here.h"

namespace quire {

#define QUIRE_DECLARE(name)   \
  namespace name {            \
  extern const Kernels table; \
  }
QUIRE_ISAS(QUIRE_DECLARE)
#undef QUIRE_DECLARE

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found;
#define QUIRE_ADD(name) \
  if (runs_here(#name)) found.push_back(&name::table);
  QUIRE_ISAS(QUIRE_ADD)
#undef QUIRE_ADD
  return found;
}

const Kernels& kernels_of(const std::string& isa) {
  for (const Kernels* kernels : available_kernels())
    if (isa == kernels->isa) return *kernels;
  throw std::invalid_argument("this machine cannot run kernels for " + isa);
}

}  // namespace quire

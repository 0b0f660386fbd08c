// The instruction sets that this machine can run. CMakeLists.txt asks for them, too.

#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace quire {

#if defined(__x86_64__)
// Linux enables AMX for processes that request it (Documentation/arch/x86/xstate.rst).
inline bool may_use_amx() {
  constexpr long kAskPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}
#endif

// Whether this machine, and Linux on it, runs what is compiled for an instruction set.
inline bool runs_here(const char* isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!std::strcmp(isa, "avx2")) return avx2;
  if (!std::strcmp(isa, "avx2_vnni")) return avx2 && __builtin_cpu_supports("avxvnni");
  if (!std::strcmp(isa, "avx512")) return avx512;
  if (!std::strcmp(isa, "avx512_vnni")) return avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (!std::strcmp(isa, "avx512_vnni_bf16") || !std::strcmp(isa, "avx512_amx_twin")) return bf16;
  if (!std::strcmp(isa, "avx512_amx"))
    return bf16 && __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") && may_use_amx();
#elif defined(__aarch64__)
  const bool dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
  if (!std::strcmp(isa, "neon")) return true;
  if (!std::strcmp(isa, "neon_dotprod")) return dotprod;
  if (!std::strcmp(isa, "neon_i8mm")) return dotprod && (getauxval(AT_HWCAP2) & HWCAP2_I8MM);
#endif
  return !std::strcmp(isa, "portable");
}

}  // namespace quire

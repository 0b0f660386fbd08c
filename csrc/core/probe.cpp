// Loops are in assembly where a compiler would fold or spill them. Each has at least 12 independent chains,
// enough to hide the latency of an instruction, and otherwise only its counter.

#include "probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>

#include "isa.h"
#include "memory.h"

namespace quire {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Loop {
  double operations;  // per iteration
  void (*run)(int64_t iterations);
};

#if defined(__x86_64__)

#define TWELVE(op) \
  op("0") op("1") op("2") op("3") op("4") op("5") op("6") op("7") op("8") op("9") op("10") op("11")
#define CLOBBERS                                                                                             \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
      "xmm13", "xmm14", "xmm15"
#define LOOP(zero, body) asm volatile(zero "1:\n" body "dec %0\n jnz 1b\n" : "+r"(n) : : "cc", CLOBBERS)

// The inputs are zero: subnormal numbers would be slow, and zeros are not faster than other numbers.
#define ZERO_X(i) "vpxor %%xmm" i ", %%xmm" i ", %%xmm" i "\n"
#define ZERO_ALL TWELVE(ZERO_X) ZERO_X("12") ZERO_X("13")

#define FMA_Z(i) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" i "\n"
#define BF16_Z(i) "vdpbf16ps %%zmm12, %%zmm13, %%zmm" i "\n"
#define INT8_Z(i) "vpdpbusd %%zmm12, %%zmm13, %%zmm" i "\n"
#define FMA_Y(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" i "\n"
#define INT8_Y(i) "%{vex%} vpdpbusd %%ymm12, %%ymm13, %%ymm" i "\n"
// Without a byte dot product: products of pairs, sums of pairs, the sum.
#define PAIRS_Z(i)                                                              \
  "vpmaddubsw %%zmm12, %%zmm13, %%zmm14\n vpmaddwd %%zmm14, %%zmm12, %%zmm15\n" \
  "vpaddd %%zmm15, %%zmm" i ", %%zmm" i "\n"
#define PAIRS_Y(i)                                                              \
  "vpmaddubsw %%ymm12, %%ymm13, %%ymm14\n vpmaddwd %%ymm14, %%ymm12, %%ymm15\n" \
  "vpaddd %%ymm15, %%ymm" i ", %%ymm" i "\n"
#define MUL_X(i) "mulps %%xmm12, %%xmm" i "\n addps %%xmm13, %%xmm" i "\n"
#define SSE_ZERO(i) "xorps %%xmm" i ", %%xmm" i "\n"

void fma_zmm(int64_t n) { LOOP(ZERO_ALL, TWELVE(FMA_Z)); }
void bf16_zmm(int64_t n) { LOOP(ZERO_ALL, TWELVE(BF16_Z)); }
void int8_zmm(int64_t n) { LOOP(ZERO_ALL, TWELVE(INT8_Z)); }
void pairs_zmm(int64_t n) { LOOP(ZERO_ALL, TWELVE(PAIRS_Z)); }
void fma_ymm(int64_t n) { LOOP(ZERO_ALL, TWELVE(FMA_Y)); }
void int8_ymm(int64_t n) { LOOP(ZERO_ALL, TWELVE(INT8_Y)); }
void pairs_ymm(int64_t n) { LOOP(ZERO_ALL, TWELVE(PAIRS_Y)); }
void mul_xmm(int64_t n) { LOOP(TWELVE(SSE_ZERO) SSE_ZERO("12") SSE_ZERO("13"), TWELVE(MUL_X)); }

// Four chains of tile products. The shapes are those of LDTILECFG: palette 1, 16 rows of 64 bytes.
#define TILE_LOOP(op)                                                                                   \
  alignas(64) static const uint8_t shapes[64] = {                                                       \
      1,  0, 0,  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 64, 0, 64, 0,  64, 0,  64, 0,  64, 0,    \
      64, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0, 0,  0, 16, 16, 16, 16, 16, 16, 16, 16};  \
  asm volatile("ldtilecfg %1\n 1:\n" op " %%tmm5, %%tmm4, %%tmm0\n" op " %%tmm7, %%tmm4, %%tmm1\n" op   \
               " %%tmm5, %%tmm6, %%tmm2\n" op " %%tmm7, %%tmm6, %%tmm3\n dec %0\n jnz 1b\n tilerelease" \
               : "+r"(n)                                                                                \
               : "m"(shapes)                                                                            \
               : "cc")
void int8_tile(int64_t n) { TILE_LOOP("tdpbssd"); }
void bf16_tile(int64_t n) { TILE_LOOP("tdpbf16ps"); }

Loop loop_of(const std::string& isa, const std::string& kind) {
  const bool wide = isa.rfind("avx512", 0) == 0, avx2 = isa.rfind("avx2", 0) == 0;
  if (kind == "f32")
    return wide ? Loop{12 * 32, fma_zmm} : avx2 ? Loop{12 * 16, fma_ymm} : Loop{12 * 8, mul_xmm};
  if (isa == "avx512_amx" && kind != "f32")
    return {4 * 16 * 16 * 64 * (kind == "bf16" ? 1.0 : 2.0), kind == "bf16" ? bf16_tile : int8_tile};
  if (kind == "bf16") return isa == "avx512_vnni_bf16" ? Loop{12 * 64, bf16_zmm} : Loop{0, nullptr};
  if (wide) return isa == "avx512" ? Loop{12 * 128, pairs_zmm} : Loop{12 * 128, int8_zmm};
  return isa == "avx2_vnni" ? Loop{12 * 64, int8_ymm} : avx2 ? Loop{12 * 64, pairs_ymm} : Loop{0, nullptr};
}

#define LOAD(size, reg) "vmovups " #size "(%0), %%" reg "\n"

// `bytes` is a multiple of 1024. Nothing is prefetched: processors fetch ahead of one stream by themselves,
// and requests of a program delay theirs.
void read_once(const std::string& isa, const uint8_t* from, size_t bytes) {
  const uint8_t* end = from + bytes;
  if (isa.rfind("avx512", 0) == 0) {
    asm volatile("1:\n" LOAD(0, "zmm0") LOAD(64, "zmm1") LOAD(128, "zmm2")
                     LOAD(192, "zmm3") "add $256, %0\n cmp %1, %0\n jb 1b\n"
                 : "+r"(from)
                 : "r"(end)
                 : "cc", "memory", CLOBBERS);
  } else if (isa.rfind("avx2", 0) == 0) {
    asm volatile("1:\n" LOAD(0, "ymm0") LOAD(32, "ymm1") LOAD(64, "ymm2")
                     LOAD(96, "ymm3") "add $128, %0\n cmp %1, %0\n jb 1b\n"
                 : "+r"(from)
                 : "r"(end)
                 : "cc", "memory", CLOBBERS);
  } else {
    asm volatile(
        "1:\n movups (%0), %%xmm0\n movups 16(%0), %%xmm1\n movups 32(%0), %%xmm2\n movups 48(%0), %%xmm3\n"
        "add $64, %0\n cmp %1, %0\n jb 1b\n"
        : "+r"(from)
        : "r"(end)
        : "cc", "memory", CLOBBERS);
  }
}

#elif defined(__aarch64__)

// 24 chains: some processors start four such instructions a cycle.
#define TWENTY_FOUR(op)                                                                                      \
  op("0") op("1") op("2") op("3") op("4") op("5") op("6") op("7") op("8") op("9") op("10") op("11") op("12") \
      op("13") op("14") op("15") op("16") op("17") op("18") op("19") op("20") op("21") op("22") op("23")
#define CLOBBERS                                                                                        \
  "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", \
      "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26"
#define ZERO(i) "movi v" i ".4s, 0\n"
#define LOOP(body)                                                                  \
  asm volatile(".arch armv8.2-a+dotprod+i8mm\n" TWENTY_FOUR(ZERO) ZERO("24")        \
                   ZERO("25") "1:\n" TWENTY_FOUR(body) "subs %0, %0, 1\n b.ne 1b\n" \
               : "+r"(n)                                                            \
               :                                                                    \
               : "cc", CLOBBERS)

#define FMA(i) "fmla v" i ".4s, v24.4s, v25.4s\n"
#define MATRICES(i) "smmla v" i ".4s, v24.16b, v25.16b\n"
#define DOTS(i) "sdot v" i ".4s, v24.16b, v25.16b\n"
// Without a byte dot product: two products in 16 bits, their sums by pairs.
#define PAIRS(i) "smull v26.8h, v24.8b, v25.8b\n smlal2 v26.8h, v24.16b, v25.16b\n sadalp v" i ".4s, v26.8h\n"

void fma_neon(int64_t n) { LOOP(FMA); }
void int8_matrices(int64_t n) { LOOP(MATRICES); }
void int8_dots(int64_t n) { LOOP(DOTS); }
void int8_pairs(int64_t n) { LOOP(PAIRS); }

Loop loop_of(const std::string& isa, const std::string& kind) {
  if (kind == "f32") return {24 * 8, fma_neon};
  if (kind == "bf16") return {0, nullptr};
  if (isa == "neon_i8mm") return {24 * 64, int8_matrices};
  return {24 * 32, isa == "neon_dotprod" ? int8_dots : int8_pairs};
}

// `bytes` is a multiple of 1024.
void read_once(const std::string&, const uint8_t* from, size_t bytes) {
  asm volatile(
      "1:\n ldp q0, q1, [%0]\n ldp q2, q3, [%0, 32]\n"
      "add %0, %0, 64\n cmp %0, %1\n b.lo 1b\n"
      : "+r"(from)
      : "r"(from + bytes)
      : "cc", "memory", CLOBBERS);
}

#else

// Other machines: plain code, protected from folding by an opaque value.
void fma_plain(int64_t n) {
  typedef float F __attribute__((vector_size(16)));
  F acc[12]{}, x{}, y{};
  for (; n > 0; --n) {
    asm volatile("" : "+m"(x), "+m"(y));
    for (F& a : acc) a += x * y;
  }
  for (F& a : acc) asm volatile("" : : "m"(a));
}

Loop loop_of(const std::string&, const std::string& kind) {
  return kind == "f32" ? Loop{12 * 8, fma_plain} : Loop{0, nullptr};
}

void read_once(const std::string&, const uint8_t* from, size_t bytes) {
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, from + i, 8);
    sum ^= word;
  }
  asm volatile("" : : "r"(sum));
}

#endif

// Runs `work(thread)` repeatedly for about `seconds`; returns the shortest time.
double shortest(ThreadPool& pool, double seconds, const std::function<void(int)>& work) {
  double best = 1e9;
  for (const double end = now() + seconds; now() < end;) {
    const double begin = now();
    pool.run(work);
    best = std::min(best, now() - begin);
  }
  return best;
}

}  // namespace

double peak_operations(ThreadPool& pool, const std::string& isa, const std::string& kind, double seconds) {
  kernels_of(isa);  // throws for an unsupported instruction set, and requests AMX
  const Loop loop = loop_of(isa, kind);
  if (!loop.run) return 0;
  constexpr int64_t kIterations = 400'000;  // about a millisecond
  const double time = shortest(pool, seconds, [&](int) { loop.run(kIterations); });
  return loop.operations * kIterations * pool.size() / time;
}

double read_bandwidth(ThreadPool& pool, const std::string& isa, size_t bytes, double seconds) {
  kernels_of(isa);
  std::vector<Memory> buffers;
  for (int i = 0; i < pool.size(); ++i) buffers.emplace_back(bytes);
  pool.run([&](int thread) { std::memset(buffers[(size_t)thread].as(), 1, bytes); });
  const size_t passes = std::max<size_t>(1, (size_t(8) << 20) / bytes);
  const double time = shortest(pool, seconds, [&](int thread) {
    for (size_t i = 0; i < passes; ++i) read_once(isa, buffers[(size_t)thread].as(), bytes);
  });
  return (double)(passes * bytes) * pool.size() / time;
}

}  // namespace quire

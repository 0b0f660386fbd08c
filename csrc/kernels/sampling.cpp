// A token from a row of logits, without sorting the vocabulary.
//
// Min-p, top-k and top-p each keep a beginning of the ranking, which is known by its last logit and by how
// many tokens with just that logit belong to it: a Cut. It is found as a radix sort would find it, from the
// highest bits down, following only the one bucket in which the count, or the weight, is reached; before
// that, all that cannot be in the beginning is left out by a bound that is cheap to know.
//
// Weights are float64, off by less than 1e-14 of themselves, so a draw differs from the NumPy twin's only
// where `u`, top_p or min_p falls that close to an edge between two tokens. Sums: of every block of 1,024
// tokens by itself, a vector's lanes apart; then of the blocks, in their order.

#include "sampling.h"

#include "table.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

namespace {

// Vectors as wide as the machine's: in doubles, GCC takes wider ones apart into single numbers.
#if defined(__AVX512DQ__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kWide = kBytes / 4, kHalf = kBytes / 8;  // floats, doubles in a vector

typedef float V __attribute__((vector_size(kBytes)));
typedef int32_t K __attribute__((vector_size(kBytes)));
typedef uint32_t U __attribute__((vector_size(kBytes)));
typedef double D __attribute__((vector_size(kBytes)));
typedef int64_t L __attribute__((vector_size(kBytes)));
typedef float N __attribute__((vector_size(kBytes / 2)));  // as many floats as doubles

// greater(v, w): w where v is NaN. bits_of: one bit for each lane of a comparison. The masks keep all lanes:
// GCC 12 warns of its own headers where there is none.
#if defined(__AVX512DQ__)
QUIRE_INLINE V greater(V v, V w) { return (V)_mm512_maskz_max_ps(0xffff, (__m512)v, (__m512)w); }
QUIRE_INLINE D greater(D v, D w) { return (D)_mm512_maskz_max_pd(0xff, (__m512d)v, (__m512d)w); }
QUIRE_INLINE D fma(D a, D b, D c) { return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
QUIRE_INLINE D widen(N v) { return (D)_mm512_maskz_cvtps_pd(0xff, (__m256)v); }
QUIRE_INLINE uint32_t bits_of(K lanes) { return _mm512_movepi32_mask((__m512i)lanes); }
#elif defined(__AVX2__)
QUIRE_INLINE V greater(V v, V w) { return (V)_mm256_max_ps((__m256)v, (__m256)w); }
QUIRE_INLINE D greater(D v, D w) { return (D)_mm256_max_pd((__m256d)v, (__m256d)w); }
QUIRE_INLINE D fma(D a, D b, D c) { return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
QUIRE_INLINE D widen(N v) { return (D)_mm256_cvtps_pd((__m128)v); }
QUIRE_INLINE uint32_t bits_of(K lanes) { return (uint32_t)_mm256_movemask_ps((__m256)lanes); }
#else
QUIRE_INLINE V greater(V v, V w) { return v > w ? v : w; }
QUIRE_INLINE D greater(D v, D w) { return v > w ? v : w; }
QUIRE_INLINE D fma(D a, D b, D c) { return a * b + c; }
QUIRE_INLINE D widen(N v) { return __builtin_convertvector(v, D); }
QUIRE_INLINE uint32_t bits_of(K lanes) {
  return (lanes[0] & 1) | (lanes[1] & 2) | (lanes[2] & 4) | (lanes[3] & 8);
}
#endif

// Stores the lanes of `keep` side by side, and perhaps anything in the rest of a vector.
template <typename T>
QUIRE_INLINE void compress(T* to, K v, uint32_t keep) {
#if defined(__AVX512DQ__)
  store_as(to, _mm512_maskz_compress_epi32((__mmask16)keep, (__m512i)v));
#else
  if (keep == (1u << kWide) - 1) return store_as(to, v);
  T lanes[kWide];
  store_as(lanes, v);
  for (; keep; keep &= keep - 1) *to++ = lanes[__builtin_ctz(keep)];
#endif
}

// The row from `i` on; lanes beyond its end are -inf, which weighs nothing and is not above anything.
template <typename T>
QUIRE_INLINE T load_row(const float* x, int64_t i, int64_t count) {
  constexpr int64_t lanes = sizeof(T) / sizeof(float);
  if (count - i >= lanes) return load_as<T>(x + i);
  T v = T{} - __builtin_inff();
  for (int64_t j = i; j < count; ++j) v[j - i] = x[j];
  return v;
}

// The bits of the first `count` lanes.
QUIRE_INLINE uint32_t lanes_below(int64_t count) { return count >= kWide ? ~0u : (1u << count) - 1; }

constexpr int64_t kBlock = 1024;  // tokens that are summed by themselves

QUIRE_INLINE int64_t block_end(int64_t first, int64_t count) {
  return count - first < kBlock ? count : first + kBlock;
}

struct Scratch {
  double *weights, *blocks;  // [count], [blocks]
  float *logits, *columns;   // [count], of the tokens kept; [blocks * kWide]
  int32_t *ids, *keys;       // [count], of the tokens kept; [count]

  Scratch(void* memory, int64_t count) {
    const int64_t padded = round_up(count, 16) + 16;  // stores are of whole vectors
    weights = (double*)memory;
    blocks = weights + padded;
    logits = (float*)(blocks + ceil_div(count, kBlock));
    columns = logits + padded;
    ids = (int32_t*)(columns + ceil_div(count, kBlock) * kWide);
    keys = ids + padded;
  }
};

// Weights ------------------------------------------------------------------------------------------------

// Of a token: exp((logit - maximum) / temperature).
struct Weighing {
  double maximum, scale;

  Weighing(double maximum, double temperature) : maximum(maximum) {
    scale = 1.44269504088896340736 / temperature;
    if (scale > 1.7e308) scale = 1.7e308;  // a tiny temperature: 0 * inf would not be 0
  }
};

#if defined(__AVX512DQ__)
// The bits of 2^(i / 16), less i << 48: what adding a number of sixteenths to the exponent puts in excess.
alignas(64) constexpr int64_t kSixteenths[16] = {
    0x3ff0000000000000, 0x3fefb5586cf9890f, 0x3fef72b83c7d517b, 0x3fef387a6e756238,
    0x3fef06fe0a31b715, 0x3feedea64c123422, 0x3feebfdad5362a27, 0x3feeab07dd485429,
    0x3feea09e667f3bcd, 0x3feea11473eb0187, 0x3feeace5422aa0db, 0x3feec49182a3f090,
    0x3feee89f995ad3ad, 0x3fef199bdd85529c, 0x3fef5818dcfba487, 0x3fefa4afa2a490da,
};
#endif

// 2^y for y <= 0. At -1023, where it ends, the exponent and all of the number become 0.
QUIRE_INLINE D exp2(D y) {
  y = greater(y, D{} - 1023.0);
#if defined(__AVX512DQ__)
  const D magic = D{} + 0x1.8p48;  // leaves no fraction but sixteenths
  const D shifted = y + magic, f = y - (shifted - magic);
  const D power = (D)(__builtin_shuffle(load_as<L>(kSixteenths), load_as<L>(kSixteenths + 8), (L)shifted) +
                      ((L)shifted << 48));
  D p = D{} + 0.0013333744338239965;  // (2^f - 1) / f on [-1/32, 1/32], 1e-14 off
  p = fma(p, f, D{} + 0.009618317140580765);
  p = fma(p, f, D{} + 0.05550410866027587);
  p = fma(p, f, D{} + 0.24022650691319414);
  p = fma(p, f, D{} + 0.6931471805599453);
  return fma(power * f, p, power);
#else
  const D magic = D{} + 0x1.8p52;  // leaves no fraction
  const D shifted = y + magic, f = y - (shifted - magic);
  D p = D{} + 7.070977866508138e-09;  // 2^f on [-1/2, 1/2], 6e-16 off
  p = fma(p, f, D{} + 1.0205905413765595e-07);
  p = fma(p, f, D{} + 1.3215451633221434e-06);
  p = fma(p, f, D{} + 1.5252672924850737e-05);
  p = fma(p, f, D{} + 1.5403530424776529e-04);
  p = fma(p, f, D{} + 1.3333558200794592e-03);
  p = fma(p, f, D{} + 9.618129107618665e-03);
  p = fma(p, f, D{} + 5.550410866465167e-02);
  p = fma(p, f, D{} + 0.24022650695910072);
  p = fma(p, f, D{} + 0.6931471805599453);
  p = fma(p, f, D{} + 1.0);
  return (D)((L)p + ((L)shifted << 52));
#endif
}

QUIRE_INLINE D weigh(N logits, const Weighing& weighing) {
  return exp2((widen(logits) - weighing.maximum) * weighing.scale);
}

// out [count, up to a multiple of 16].
void weigh(const float* x, int64_t count, Weighing weighing, double* out) {
  for (int64_t i = 0; i < count; i += kHalf) store_as(out + i, weigh(load_row<N>(x, i, count), weighing));
}

double sum_block(const float* x, int64_t count, Weighing weighing) {
  D even{}, odd{};
  for (int64_t i = 0; i < count; i += 2 * kHalf) {
    even += weigh(load_row<N>(x, i, count), weighing);
    if (i + kHalf < count) odd += weigh(load_row<N>(x, i + kHalf, count), weighing);
  }
  even += odd;
  double sum = 0;
  for (int i = 0; i < kHalf; ++i) sum += even[i];
  return sum;
}

// The sum of all weights, and, where `blocks` is not null, that of each block.
double sum(const float* x, int64_t count, Weighing weighing, double* blocks) {
  double total = 0;
  for (int64_t i = 0; i < count; i += kBlock) {
    const double weight = sum_block(x + i, block_end(i, count) - i, weighing);
    if (blocks) blocks[i / kBlock] = weight;
    total += weight;
  }
  return total;
}

// The index at which the running sum of the weights exceeds the fraction u of their sum; it has weight.
int64_t inverse_cumulative(const float* x, int64_t count, Weighing weighing, double u, double* blocks) {
  const double target = u * sum(x, count, weighing, blocks);
  double before = 0;
  int64_t first = 0;
  // u < 1, so the target is below the sum also when rounded, and a block is found.
  for (; first + kBlock < count && before + blocks[first / kBlock] <= target; first += kBlock)
    before += blocks[first / kBlock];
  const int64_t end = block_end(first, count);
  double weights[kBlock];
  weigh(x + first, end - first, weighing, weights);
  int64_t last = first;
  for (int64_t i = first; i < end; ++i) {
    if (weights[i - first] > 0) last = i;  // the answer, where the block's sum was rounded otherwise
    before += weights[i - first];
    if (before > target) break;
  }
  return last;
}

// Selection ----------------------------------------------------------------------------------------------

struct Cut {
  float threshold;  // greater logits are kept, and of the equal ones
  int64_t equals;   // so many, the lowest ids first
};

struct Range {
  int32_t low, high;
};

// Integers in the order of the floats; both zeros are one number.
QUIRE_INLINE K key_of(V x) {
  const K bits = (K)(x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

float of_key(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  return load_as<float>(&bits);
}

Range make_keys(const float* x, int64_t count, int32_t* keys) {
  for (int64_t i = 0; i < count; i += kWide) store_as(keys + i, key_of(load_row<V>(x, i, count)));
  Range range{0x7fffffff, (int32_t)0x80000000};
  for (int64_t i = 0; i < count; ++i) {
    range.low = keys[i] < range.low ? keys[i] : range.low;
    range.high = keys[i] > range.high ? keys[i] : range.high;
  }
  return range;
}

// Follows the greatest keys until their weights reach `target`: leaves in `keys` and `weights` those of the
// one bucket where that happens, narrows `range` to them, and adds to `above` what outranks them.
int64_t narrow(int32_t* keys, double* weights, int64_t count, double target, Range& range, double& above) {
  constexpr int kBuckets = 512, kCopies = 4;  // copies, so that equal neighbours need not wait for each other
  double sums[kBuckets][kCopies] = {};
  const uint32_t low = (uint32_t)range.low, width = (uint32_t)range.high - low;
  int shift = 0;
  while (width >> shift >= kBuckets) ++shift;
  for (int64_t i = 0; i < count; ++i) sums[((uint32_t)keys[i] - low) >> shift][i % kCopies] += weights[i];
  uint32_t bucket = width >> shift;
  for (; bucket > 0; --bucket) {
    const double weight = (sums[bucket][0] + sums[bucket][1]) + (sums[bucket][2] + sums[bucket][3]);
    if (above + weight >= target) break;
    above += weight;
  }
  int64_t kept = 0;
  range = {0x7fffffff, (int32_t)0x80000000};
  for (int64_t first = 0; first < count; first += kWide) {
    const U keys_here = load_as<U>(keys + first);
    uint32_t found = bits_of((K)((keys_here - low) >> shift == bucket)) & lanes_below(count - first);
    for (; found; found &= found - 1, ++kept) {
      const int64_t i = first + __builtin_ctz(found);
      const int32_t key = keys[i];
      range.low = key < range.low ? key : range.low;
      range.high = key > range.high ? key : range.high;
      keys[kept] = key;
      weights[kept] = weights[i];
    }
  }
  return kept;
}

// The shortest beginning of the ranking whose weights reach `target`; all, if none does. Uses up the weights.
Cut select(const float* x, double* weights, int64_t count, double target, int32_t* keys) {
  Range range = make_keys(x, count, keys);
  double above = 0;
  while (count > 1 && range.low != range.high) count = narrow(keys, weights, count, target, range, above);
  const double weight = weights[0], quotient = (target - above) / weight;
  int64_t equals = quotient < (double)count ? (int64_t)quotient : count;  // also where it is NaN
  if (equals < 1) equals = 1;
  while (equals < count && above + (double)equals * weight < target) ++equals;
  while (equals > 1 && above + (double)(equals - 1) * weight >= target) --equals;
  return {of_key(range.low), equals};
}

// The tokens of a row that are still in question, in order of id.
struct Kept {
  const float* logits;
  const int32_t* ids;  // null: 0, 1, 2 ...
  int64_t count;
};

// What a cut leaves, into scratch.logits and scratch.ids; `kept` may lie there already.
Kept apply(Cut cut, Kept kept, const Scratch& scratch) {
  float* const logits = scratch.logits;
  int32_t* const ids = scratch.ids;
  K counting;
  for (int i = 0; i < kWide; ++i) counting[i] = i;
  int64_t count = 0;
  for (int64_t i = 0; i < kept.count; i += kWide) {
    const V v = load_row<V>(kept.logits, i, kept.count);
    uint32_t keep = bits_of(v >= cut.threshold) & lanes_below(kept.count - i);
    if (keep == 0) continue;
    uint32_t equal = bits_of(v == cut.threshold) & keep;
    for (int64_t surplus = __builtin_popcount(equal) - cut.equals; surplus > 0; --surplus) {
      const uint32_t last = 1u << (31 - __builtin_clz(equal));
      equal ^= last, keep ^= last;
    }
    cut.equals -= __builtin_popcount(equal);
    const K numbers = kept.ids ? load_as<K>(kept.ids + i) : counting + (int32_t)i;
    compress(logits + count, (K)v, keep);
    compress(ids + count, numbers, keep);
    count += __builtin_popcount(keep);
  }
  return {logits, ids, count};
}

Cut kth(const float* x, int64_t count, int64_t k, const Scratch& scratch) {
  for (int64_t i = 0; i < count; ++i) scratch.weights[i] = 1;
  return select(x, scratch.weights, count, (double)k, scratch.keys);
}

// The greatest logit of each column of each block, into scratch.columns; how many.
int64_t make_columns(const float* x, int64_t count, const Scratch& scratch) {
  int64_t columns = 0;
  for (int64_t first = 0; first < count; first += kBlock, columns += kWide) {
    const int64_t end = block_end(first, count);
    V highest = V{} - __builtin_inff();
    for (int64_t i = first; i < end; i += kWide) highest = greater(load_row<V>(x, i, end), highest);
    store_as(scratch.columns + columns, highest);
  }
  return columns;
}

// The first k tokens of the ranking, 0 < k < kept.count.
Kept keep_top_k(Kept kept, int64_t k, const Scratch& scratch) {
  // k columns have a logit not below the k-th greatest of the columns: no token below it is wanted.
  if (k <= kept.count / kBlock * kWide / 2) {
    const int64_t columns = make_columns(kept.logits, kept.count, scratch);
    kept = apply({kth(scratch.columns, columns, k, scratch).threshold, kept.count}, kept, scratch);
  }
  return apply(kth(kept.logits, kept.count, k, scratch), kept, scratch);
}

// The least logit that weighs `weight`, which is at most 1.
float logit_of(double weight, Weighing weighing) {
  const double logit = weighing.maximum + __builtin_log2(weight) / weighing.scale;
  const float nearest = (float)logit;
  return nearest < logit ? of_key(key_of(V{} + nearest)[0] + 1) : nearest;
}

// The shortest beginning of the ranking that has top_p of the weight.
Kept keep_top_p(Kept kept, Weighing weighing, double top_p, const Scratch& scratch) {
  const double total = sum(kept.logits, kept.count, weighing, nullptr);
  // All tokens lighter than this weigh less than 1 - top_p of the sum together: none is in the nucleus. The
  // half leaves room for rounding.
  const double lightest = 0.5 * (1 - top_p) * total / (double)kept.count;
  kept = apply({logit_of(lightest, weighing), kept.count}, kept, scratch);
  weigh(kept.logits, kept.count, weighing, scratch.weights);
  return apply(select(kept.logits, scratch.weights, kept.count, top_p * total, scratch.keys), kept, scratch);
}

// The first NaN of a row, if it has one.
bool find_nan(const float* x, int64_t count, Greatest& found) {
  for (int64_t i = 0; i < count; i += kWide) {
    const V v = load_row<V>(x, i, count);
    if (const uint32_t nan = bits_of(v != v)) {
      found = {i + __builtin_ctz(nan), __builtin_nanf("")};
      return true;
    }
  }
  return false;
}

}  // namespace

Greatest greatest(const float* x, int64_t count) {
  constexpr int kStreams = 4;  // so that one maximum need not wait for the one before
  constexpr int64_t step = kStreams * kWide;
  V faults{};  // 0, or NaN where a logit is not finite
  Greatest best{0, -__builtin_inff()};
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t end = block_end(first, count), whole = first + (end - first) / step * step;
    V high[kStreams], fault[kStreams] = {};
    for (V& h : high) h = V{} - __builtin_inff();
    for (int64_t i = first; i < whole; i += step) {
      for (int s = 0; s < kStreams; ++s) {
        const V v = load_as<V>(x + i + s * kWide);
        high[s] = greater(v, high[s]);
        fault[s] += v * 0.0f;
      }
    }
    for (int64_t i = whole; i < end; i += kWide) {
      const V v = load_row<V>(x, i, end);
      high[0] = greater(v, high[0]);
      faults += v * 0.0f;  // the lanes beyond the end are a false alarm
    }
    faults += (fault[0] + fault[1]) + (fault[2] + fault[3]);
    const V highest = greater(greater(high[0], high[1]), greater(high[2], high[3]));
    for (int lane = 0; lane < kWide; ++lane)
      if (highest[lane] > best.logit) best = {first, highest[lane]};
  }
  if (bits_of(faults != faults) && find_nan(x, count, best)) return best;
  while (x[best.id] != best.logit) ++best.id;  // from the beginning of the block
  return {best.id, x[best.id]};
}

int64_t draw(const float* logits, int64_t count, const Draw& how, void* memory) {
  const Scratch scratch(memory, count);
  const Weighing weighing(how.maximum, how.temperature);
  Kept kept{logits, nullptr, count};
  if (how.min_p > 0) kept = apply({logit_of(how.min_p, weighing), count}, kept, scratch);
  if (how.top_k > 0 && how.top_k < kept.count) kept = keep_top_k(kept, how.top_k, scratch);
  if (how.top_p < 1) kept = keep_top_p(kept, weighing, how.top_p, scratch);
  if (kept.count == 0) return 0;  // the row has NaN, or the maximum is not its own
  const int64_t index = inverse_cumulative(kept.logits, kept.count, weighing, how.u, scratch.blocks);
  return kept.ids ? kept.ids[index] : index;
}

double exp_sum(const float* logits, int64_t count, double maximum) {
  return sum(logits, count, Weighing(maximum, 1), nullptr);
}

int64_t rank(const float* x, int64_t count, int64_t id) {
  const float logit = x[id];
  int64_t place = 1, i = 0;
  K counts{};
  for (; i + kWide <= id; i += kWide) counts -= load_as<V>(x + i) >= logit;
  for (; i < id; ++i) place += x[i] >= logit;
  for (; i < count; i += kWide) counts -= load_row<V>(x, i, count) > logit;
  for (int lane = 0; lane < kWide; ++lane) place += counts[lane];
  return place;
}

void top_ids(const float* logits, int64_t count, int64_t k, int64_t* ids, void* memory) {
  Kept kept{logits, nullptr, count};
  if (k < count) kept = keep_top_k(kept, k, Scratch(memory, count));
  for (int64_t i = 0; i < kept.count; ++i) {  // insert by logit; equal ones come in order of id already
    int64_t at = i;
    for (; at > 0 && logits[ids[at - 1]] < kept.logits[i]; --at) ids[at] = ids[at - 1];
    ids[at] = kept.ids ? kept.ids[i] : i;
  }
}

}  // namespace quire::QUIRE_ISA

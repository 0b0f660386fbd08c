// The first pass over a row of logits: edits and statistics, block by block. Part of choose.cpp.
//
// For each block of 1,024 tokens the greatest logit and the weight, relative to that logit, are computed
// while the block is in the L1 cache. A block affected by edits is edited in scratch memory; a block in which
// all tokens are excluded is skipped afterwards.
#pragma once

#include "sampling_select.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr uint32_t kAll = (1u << kWide) - 1;  // a bit for each lane

// Statistics of the blocks of a row.
struct Survey {
  Scratch scratch;
  const float** at;  // [blocks] logits after the edits; null if none is above -inf
  double* weights;   // [blocks] relative to the greatest logit of the row
  float* highest;    // [blocks] the greatest logits
  float* edited;     // [count]
  int64_t count, id;
  float maximum;  // the greatest logit of the row after the edits, of token `id`
  bool unusual;   // a logit was not finite before the edits

  Survey(void* memory, int64_t count) : scratch(memory, count), count(count), id(0) {
    const int64_t blocks = ceil_div(count, kBlock), used = round_up(sampling_scratch_bytes(count), 64);
    at = (const float**)((uint8_t*)memory + used);
    weights = (double*)(at + blocks);
    highest = (float*)(weights + blocks);
    edited = highest + round_up(blocks, 16);
    maximum = kMinusInf;
    unusual = false;
  }
};

// A list of ids that is processed block by block.
struct Walk {
  Ids list;
  int64_t next = 0;

  bool reaches(int64_t end) const { return next < list.count && list.ids[next] < end; }
};

// The progress through the lists of the edits.
struct Editing {
  const Edits& edits;
  Walk allowed, biased, disallowed;
  int64_t next_emitted = 0;

  explicit Editing(const Edits& edits)
      : edits(edits), allowed{edits.allowed}, biased{edits.biased}, disallowed{edits.disallowed} {}

  bool reaches_emitted(int64_t end) const {
    return next_emitted < edits.num_emitted && edits.emitted[next_emitted].id < end;
  }
};

// Sets lanes without a bit to -inf. `bits` are those of the lanes, from the lowest.
QUIRE_INLINE V masked(V v, uint32_t bits) {
#if defined(__AVX512DQ__)
  return (V)_mm512_mask_blend_ps((__mmask16)bits, _mm512_set1_ps(kMinusInf), (__m512)v);
#else
  K each;
  for (int i = 0; i < kWide; ++i) each[i] = 1 << i;
  return ((each & (int32_t)bits) != 0) ? v : V{} + kMinusInf;
#endif
}

bool has_bits(const uint32_t* words, int64_t count, uint32_t& missing) {
  uint32_t any = 0, all = ~0u;
  for (int64_t i = 0; i < count; ++i) any |= words[i], all &= words[i];
  missing = ~all;
  return any != 0;
}

// to[0 ... end - first) = x[first ... end), or -inf if the mask has no bit.
void copy_masked(const float* x, int64_t first, int64_t end, const uint32_t* mask, float* to) {
  for (int64_t i = first; i < end; i += kWide)
    store_as(to + i - first, masked(load_row<V>(x, i, end), mask[i / 32] >> (i % 32)));
}

float penalized(float logit, const Emitted& token, const Edits& edits) {
  if (edits.repetition != 1) {
    const double wide = logit;  // in float32 a tiny penalty would round to zero
    logit = (float)(wide > 0 ? wide / edits.repetition : wide * edits.repetition);
  }
  if (edits.frequency != 0) logit -= edits.frequency * (float)token.count;
  if (edits.presence != 0) logit -= edits.presence * (token.count > 0 ? 1.0f : 0.0f);
  return logit;
}

// Returns the logits of a block after the edits: in `x` itself if there are none, else in `to`; null if all
// are known to be -inf.
const float* edit(const float* x, int64_t first, int64_t end, Editing& now, float* to) {
  const Edits& edits = now.edits;
  const bool touched = now.biased.reaches(end) || now.disallowed.reaches(end) || now.reaches_emitted(end);
  bool left = true, copied = false;
  uint32_t missing = 0;
  if (edits.restricts) {
    left = now.allowed.reaches(end);
  } else if (edits.mask) {
    left = has_bits(edits.mask + first / 32, ceil_div(end - first, 32), missing);
  }
  if (left && edits.restricts) {
    for (int64_t i = 0; i < end - first; i += kWide) store_as(to + i, V{} + kMinusInf);
    for (; now.allowed.reaches(end); ++now.allowed.next) {
      const int32_t id = now.allowed.list.ids[now.allowed.next];
      if (!edits.mask || (edits.mask[id / 32] >> (id % 32) & 1)) to[id - first] = x[id];
    }
    copied = true;
  } else if (left && missing) {
    copy_masked(x, first, end, edits.mask, to);
    copied = true;
  } else if (left && touched) {
    __builtin_memcpy(to, x + first, (size_t)(end - first) * sizeof(float));
    copied = true;
  }
  // The lists advance even if nothing is left; -inf plus a bias is -inf.
  for (; now.biased.reaches(end); ++now.biased.next)
    if (copied) to[now.biased.list.ids[now.biased.next] - first] += edits.biases[now.biased.next];
  for (; now.disallowed.reaches(end); ++now.disallowed.next)
    if (copied) to[now.disallowed.list.ids[now.disallowed.next] - first] = kMinusInf;
  for (; now.reaches_emitted(end); ++now.next_emitted) {
    const Emitted& token = edits.emitted[now.next_emitted];
    if (copied) to[token.id - first] = penalized(to[token.id - first], token, edits);
  }
  return !left ? nullptr : copied ? to : x + first;
}

// Processes the row; with `weighing`, sums the weights of each block relative to its greatest logit. Blocks
// below 2^least of the greatest weight so far count as zero.
template <bool Edited>
void survey(const float* x, const Edits& edits, const Weighing* weighing, double least, Survey& found) {
  Editing now(edits);
  V faults{};
  for (int64_t first = 0, b = 0; first < found.count; first += kBlock, ++b) {
    const int64_t end = block_end(first, found.count), size = end - first;
    const float* at = x + first;
    V high = highest_of(at, size, faults);
    if (Edited) {
      at = edit(x, first, end, now, found.edited + first);
      V ignored{};
      if (!at) {
        high = V{} + kMinusInf;
      } else if (at != x + first) {
        high = highest_of(at, size, ignored);
      }
    }
    store_as(found.scratch.columns + b * kWide, high);
    const float highest = greatest_lane(high);
    if (highest > found.maximum) {
      found.maximum = highest;
      for (found.id = 0; at[found.id] != highest;) ++found.id;
      found.id += first;
    }
    found.at[b] = highest > kMinusInf ? at : nullptr;
    found.highest[b] = highest;
    if (!weighing) continue;
    const bool matters = ((double)highest - found.maximum) * weighing->scale > least;  // false for NaN
    Weighing own = *weighing;
    own.maximum = highest;
    found.weights[b] = matters ? sum_block(at, size, own) : 0;
  }
  found.unusual = bits_of(faults != faults) != 0;
}

// Rescales the weights of blocks to the greatest logit of the row; returns their sum. A block whose tokens
// all have weight zero has weight zero.
double level(const Weighing& weighing, Survey& found) {
  const int64_t blocks = ceil_div(found.count, kBlock);
  double total = 0;
  for (int64_t first = 0; first < blocks; first += 16) {
    double factors[16];
    const int64_t count = blocks - first < 16 ? blocks - first : 16;
    weigh(found.highest + first, count, weighing, factors);
    for (int64_t i = 0; i < count; ++i) {
      double& weight = found.weights[first + i];
      weight = factors[i] > 1e-300 ? weight * factors[i] : 0;
      total += weight;
    }
  }
  return total;
}

}  // namespace

}  // namespace quire::QUIRE_ISA

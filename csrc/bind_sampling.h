// Rows to be sampled, as passed from Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "core/isa.h"
#include "core/sampler.h"
#include "core/thread_pool.h"

namespace quire {

// Throws unless a mask of this many words has one bit per token.
void check_mask(size_t words, int64_t vocab_size);

// Each row is a tuple: slot; the first row of logits whose next tokens are to be scored, and these tokens;
// the row of logits to sample from, or -1; the drafted tokens, which use the following rows of logits; and
// None or the masks of the sampled positions, each an array of bits or None.
class RowArguments {
 public:
  // Throws if a number is out of range: the sampler must hold the slots, and rows of logits must be below
  // `num_logits`.
  RowArguments(const nanobind::list& rows, const Sampler& sampler, int64_t num_logits);

  const std::vector<SampledRow>& rows() const { return rows_; }

 private:
  using Mask =
      nanobind::ndarray<const uint32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

  const int64_t* tokens(const nanobind::handle& ids, int64_t vocab_size, int64_t& count);
  const uint32_t* const* masks(const nanobind::handle& masks, int64_t vocab_size, int64_t count);

  std::vector<SampledRow> rows_;
  std::deque<std::vector<int64_t>> tokens_;
  std::deque<std::vector<const uint32_t*>> masks_;
  std::vector<Mask> held_;
};

// A sampler for Python, with its own threads and the results of its last call. The Sampler itself can also be
// called from the threads of a program.
class PooledSampler {
 public:
  using Logits = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

  PooledSampler(const std::string& isa, int64_t vocab_size, int64_t max_slots, int threads)
      : sampler(kernels_of(isa), vocab_size, max_slots), pool_(threads) {}

  SampledResults& sample(const Logits& logits, const nanobind::list& rows);

  Sampler sampler;

 private:
  ThreadPool pool_;
  SampledResults results_;
};

}  // namespace quire

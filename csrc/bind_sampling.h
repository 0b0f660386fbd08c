// Rows that are to be sampled, as they come from Python.
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

// Throws unless a mask of so many words has a bit for each token.
void check_mask(size_t words, int64_t vocab_size);

// Each row is a tuple: slot; the first of the rows of logits whose following tokens are to be scored, and
// these tokens; the row of logits to sample from, or -1; tokens drafted behind it, which have the rows of
// logits that follow; and None or the masks of the sampled positions, each an array of bits or None.
class RowArguments {
 public:
  // Throws where a number is out of range: slots must be held by the sampler, rows of logits below
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

// What Python has of a sampler: it, threads of its own, and the results of its last call. Its core may as
// well be called from a program's threads.
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

#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "philox.h"

namespace quire {

namespace {

std::vector<int32_t> sorted(const std::vector<int64_t>& ids) {
  std::vector<int32_t> sorted(ids.begin(), ids.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

Ids list_of(const std::vector<int32_t>& ids) { return {ids.data(), (int64_t)ids.size()}; }

void check_vocabulary(const std::vector<int64_t>& ids, int64_t vocab_size) {
  for (const int64_t id : ids)
    if (id < 0 || id >= vocab_size)
      throw std::invalid_argument("token id " + std::to_string(id) + " is not in the vocabulary");
}

// Returns an integer that sorts in ranking order: greater logits first, then lower ids.
uint64_t ranking_key(float logit, int64_t id) {
  const float value = logit + 0.0f;  // makes -0 equal to 0
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t ascending = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return (uint64_t)~ascending << 32 | (uint64_t)id;
}

// Clears a list, and frees its memory if it has the rare size of a whole vocabulary.
template <typename T>
void empty(std::vector<T>& list) {
  list.clear();
  if (list.capacity() > 1 << 14) list.shrink_to_fit();
}

}  // namespace

void SampledResults::clear() {
  for (auto* list : {&token_ids, &counts, &faults, &scored, &listed, &entries, &ranks, &listed_ids})
    empty(*list);
  empty(logprobs);
  plain = true;
}

// The parameters of a sequence, and its history.
struct Sampler::Slot {
  SlotParams params;
  std::vector<int32_t> allowed, biased, stops;
  std::vector<float> biases;  // in the order of `biased`
  size_t longest = 0;         // of the bad words
  bool penalizes_output, penalizes_all;
  SlotHistory history;

  Slot(const SlotParams& given, const int64_t* tokens, int64_t count) : params(given) {
    if (params.allowed_ids) {
      allowed = sorted(*params.allowed_ids);
      params.allowed_ids.emplace();  // they may be many
    }
    stops = sorted(params.stop_ids);
    std::vector<std::pair<int32_t, float>> pairs;
    for (size_t i = 0; i < params.bias_ids.size(); ++i)
      pairs.emplace_back((int32_t)params.bias_ids[i], params.biases[i]);
    std::sort(pairs.begin(), pairs.end());
    for (const auto& [id, bias] : pairs) biased.push_back(id), biases.push_back(bias);
    for (const auto& word : params.bad_words) longest = std::max(longest, word.size());
    penalizes_all = params.repetition_penalty != 1;
    penalizes_output = penalizes_all || params.presence_penalty != 0 || params.frequency_penalty != 0;
    const int64_t prompt = std::min(params.num_prompt_tokens, count);
    if (penalizes_all) {
      std::vector<int32_t> seen = sorted({tokens, tokens + prompt});
      seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
      for (const int32_t id : seen) history.emitted.push_back({id, 0});
    }
    history.num_tokens = params.num_prompt_tokens;
    extend(history, tokens + prompt, count - prompt);
  }

  void extend(SlotHistory& to, const int64_t* tokens, int64_t count) const {
    to.num_tokens += count;
    for (int64_t i = 0; penalizes_output && i < count; ++i) {
      const auto at = std::lower_bound(to.emitted.begin(), to.emitted.end(), tokens[i],
                                       [](const Emitted& token, int64_t id) { return token.id < id; });
      if (at != to.emitted.end() && at->id == tokens[i]) {
        ++at->count;
      } else {
        to.emitted.insert(at, {(int32_t)tokens[i], 1});
      }
    }
    if (longest == 0) return;
    to.recent.insert(to.recent.end(), tokens, tokens + count);
    if (to.recent.size() > longest)
      to.recent.erase(to.recent.begin(), to.recent.end() - (std::ptrdiff_t)longest);
  }

  // True until `min_tokens` tokens have been emitted.
  bool suppresses_stop(const SlotHistory& at) const {
    return at.num_tokens - params.num_prompt_tokens < params.min_tokens;
  }

  // Adds the last tokens of bad words that they would complete.
  void add_bad_words(const SlotHistory& at, std::vector<int32_t>& disallowed) const {
    for (const auto& word : params.bad_words) {
      const size_t before = word.size() - 1;
      if (before <= at.recent.size() &&
          std::equal(word.begin(), word.end() - 1, at.recent.end() - (std::ptrdiff_t)before))
        disallowed.push_back((int32_t)word.back());
    }
  }
};

Sampler::Sampler(const Kernels& kernels, int64_t vocab_size, int64_t max_slots)
    : kernels_(kernels), vocab_size_(vocab_size), slots_((size_t)max_slots) {
  if (vocab_size < 1 || vocab_size > INT32_MAX)
    throw std::invalid_argument("the size of the vocabulary is out of range");
}

Sampler::~Sampler() = default;

void Sampler::admit(int64_t slot, const SlotParams& params, const int64_t* tokens, int64_t count) {
  if (slot < 0 || slot >= (int64_t)slots_.size() || slots_[slot])
    throw std::invalid_argument("slot " + std::to_string(slot) + " is taken, or there is none");
  check_vocabulary({tokens, tokens + count}, vocab_size_);
  check_vocabulary(params.bias_ids, vocab_size_);
  check_vocabulary(params.stop_ids, vocab_size_);
  if (params.allowed_ids) check_vocabulary(*params.allowed_ids, vocab_size_);
  for (const auto& word : params.bad_words) {
    check_vocabulary(word, vocab_size_);
    if (word.empty()) throw std::invalid_argument("a bad word without tokens");
  }
  if (params.bias_ids.size() != params.biases.size()) throw std::invalid_argument("expected one bias per id");
  slots_[slot] = std::make_unique<Slot>(params, tokens, count);
}

void Sampler::release(int64_t slot) {
  if (!holds(slot)) throw std::invalid_argument("slot " + std::to_string(slot) + " is empty");
  slots_[slot].reset();
}

void Sampler::sample(ThreadPool& pool, const float* logits, const std::vector<SampledRow>& rows,
                     SampledResults& results) {
  if (begin(logits, rows, pool.size()) > 1) {
    pool.run([this](int thread) { work(thread); });
  } else {
    work(0);
  }
  finish(results);
}

int64_t Sampler::begin(const float* logits, const std::vector<SampledRow>& rows, int threads) {
  logits_ = logits;
  rows_ = &rows;
  tasks_.clear();
  for (int64_t row = 0; row < (int64_t)rows.size(); ++row) {
    for (int64_t i = 0; i < rows[row].num_scored; ++i) tasks_.push_back({row, i, true});
    for (int64_t i = 0; i < rows[row].num_sampled; ++i) tasks_.push_back({row, i, false});
  }
  if (outcomes_.size() < tasks_.size()) outcomes_.resize(tasks_.size());
  reserve_scratch(threads);
  taken_.store(0, std::memory_order_relaxed);
  return (int64_t)tasks_.size();
}

void Sampler::reserve_scratch(int threads) {
  if (scratch_.size() < (size_t)threads) scratch_.resize((size_t)threads);
  for (ThreadScratch& scratch : scratch_) scratch.memory.reserve((size_t)choosing_scratch_bytes(vocab_size_));
}

void Sampler::propose(ThreadPool& pool, const float* logits, int64_t width,
                      const std::vector<Proposing>& slots, std::vector<int64_t>& drawn) {
  const int64_t count = (int64_t)slots.size();
  drawn.resize(slots.size());
  reserve_scratch(pool.size());
  taken_.store(0, std::memory_order_relaxed);
  const auto work = [&](int thread) {
    ThreadScratch& scratch = scratch_[thread];
    for (int64_t i; (i = taken_.fetch_add(1, std::memory_order_relaxed)) < count;) {
      const float* row = logits + i * width;
      if (width < vocab_size_) {
        scratch.padded.assign((size_t)vocab_size_, -INFINITY);
        std::copy_n(row, width, scratch.padded.begin());
        row = scratch.padded.data();
      }
      const Proposing& one = slots[i];
      const Chosen chosen = choose(row, *slots_[one.slot], one.following, one.count, nullptr, scratch);
      drawn[i] = chosen.fault == Fault::none ? chosen.id : -1;
    }
  };
  if (count > 1) {
    pool.run(work);
  } else {
    work(0);
  }
}

void Sampler::work(int thread) {
  const int64_t count = (int64_t)tasks_.size();
  for (int64_t i; (i = taken_.fetch_add(1, std::memory_order_relaxed)) < count;)
    run(tasks_[i], scratch_[thread], outcomes_[i]);
}

void Sampler::run(const Task& task, ThreadScratch& scratch, Outcome& outcome) const {
  const SampledRow& row = (*rows_)[task.row];
  const SlotParams& params = slots_[row.slot]->params;
  outcome.fault = Fault::none;
  outcome.ids.clear();
  outcome.logprobs.clear();
  const float* logits =
      logits_ + (task.scores ? row.first_scored : row.first_sampled) * vocab_size_ + task.index * vocab_size_;
  if (task.scores) {
    outcome.token = row.following[task.index];
    list_logprobs(logits, params.prompt_logprobs.value_or(0), scratch, outcome);
  } else {
    const uint32_t* mask = row.masks ? row.masks[task.index] : nullptr;
    const Chosen chosen = choose(logits, *slots_[row.slot], row.drafted, task.index, mask, scratch);
    outcome.fault = chosen.fault;
    outcome.token = chosen.id;
    if (outcome.fault == Fault::none && params.logprobs)
      list_logprobs(logits, *params.logprobs, scratch, outcome);
  }
}

// Chooses the token after those of a slot and `following`, as if these had been emitted.
Chosen Sampler::choose(const float* logits, const Slot& slot, const int64_t* following, int64_t count,
                       const uint32_t* mask, ThreadScratch& scratch) const {
  if (count == 0) return choose_edited(logits, slot, slot.history, mask, scratch);
  scratch.history = slot.history;
  slot.extend(scratch.history, following, count);
  return choose_edited(logits, slot, scratch.history, mask, scratch);
}

Chosen Sampler::choose_edited(const float* logits, const Slot& slot, const SlotHistory& history,
                              const uint32_t* mask, ThreadScratch& scratch) const {
  const SlotParams& params = slot.params;
  const bool suppresses = slot.suppresses_stop(history);
  scratch.disallowed.clear();
  slot.add_bad_words(history, scratch.disallowed);
  if (suppresses) scratch.disallowed.insert(scratch.disallowed.end(), slot.stops.begin(), slot.stops.end());
  std::sort(scratch.disallowed.begin(), scratch.disallowed.end());
  Edits edits{params.allowed_ids.has_value(),
              list_of(slot.allowed),
              list_of(slot.biased),
              slot.biases.data(),
              mask,
              list_of(scratch.disallowed),
              history.emitted.data(),
              (int64_t)history.emitted.size(),
              params.repetition_penalty,
              (float)params.frequency_penalty,
              (float)params.presence_penalty};
  Choosing how{params.temperature, params.top_p, params.min_p, params.top_k, 0};
  if (params.temperature != 0)
    how.u = uniform((uint64_t)params.seed, (uint32_t)params.sequence, (uint64_t)history.num_tokens);
  const auto choose = [&](const Edits& edits, const Choosing& how) {
    return kernels_.choose(logits, vocab_size_, edits, how, scratch.memory.as<void>());
  };
  const Chosen chosen = choose(edits, how);
  if (chosen.fault != Fault::excluded || !suppresses || !mask) return chosen;
  // If the grammar allows only an end token, the output may end before min_tokens. Bad words and penalties do
  // not affect whether that is the case.
  Edits before = edits;
  before.disallowed = list_of(slot.stops);
  before.num_emitted = 0;
  if (choose(before, {0, 1, 0, 0, 0}).fault == Fault::none) return chosen;
  scratch.disallowed.clear();
  slot.add_bad_words(history, scratch.disallowed);
  std::sort(scratch.disallowed.begin(), scratch.disallowed.end());
  edits.disallowed = list_of(scratch.disallowed);
  return choose(edits, how);
}

void Sampler::list_logprobs(const float* logits, int64_t k, ThreadScratch& scratch, Outcome& outcome) const {
  const float maximum = kernels_.greatest(logits, vocab_size_).logit;
  if (!std::isfinite(maximum)) {
    outcome.fault = maximum == -INFINITY  ? Fault::only_minus_inf
                    : std::isnan(maximum) ? Fault::nan
                                          : Fault::infinite;
    return;
  }
  const double log_sum = std::log(kernels_.exp_sum(logits, vocab_size_, maximum));
  const int64_t count = k < 0 ? vocab_size_ : std::min(k, vocab_size_);
  outcome.ids.resize((size_t)count + 1);
  outcome.ids[0] = outcome.token;
  if (count > kMostTop) {
    scratch.keys.resize((size_t)vocab_size_);
    for (int64_t i = 0; i < vocab_size_; ++i) scratch.keys[i] = ranking_key(logits[i], i);
    if (count < vocab_size_)
      std::nth_element(scratch.keys.begin(), scratch.keys.begin() + count, scratch.keys.end());
    std::sort(scratch.keys.begin(), scratch.keys.begin() + count);
    for (int64_t i = 0; i < count; ++i) outcome.ids[i + 1] = (int64_t)(uint32_t)scratch.keys[i];
  } else if (count > 0) {
    kernels_.top_ids(logits, vocab_size_, count, outcome.ids.data() + 1, scratch.memory.as<void>());
  }
  for (const int64_t id : outcome.ids)
    outcome.logprobs.push_back((float)((double)logits[id] - (double)maximum - log_sum));
  outcome.rank = kernels_.rank(logits, vocab_size_, outcome.token);
}

void Sampler::finish(SampledResults& results) {
  results.clear();
  const auto list = [&](const Outcome& outcome) {
    results.entries.push_back((int64_t)outcome.ids.size());
    results.ranks.push_back(outcome.rank);
    results.listed_ids.insert(results.listed_ids.end(), outcome.ids.begin(), outcome.ids.end());
    results.logprobs.insert(results.logprobs.end(), outcome.logprobs.begin(), outcome.logprobs.end());
  };
  const Outcome* next = outcomes_.data();
  for (const SampledRow& row : *rows_) {
    const Outcome *const scored = next, *const sampled = scored + row.num_scored;
    next = sampled + row.num_sampled;
    Slot& slot = *slots_[row.slot];
    const auto faulty =
        std::find_if(scored, sampled, [](const Outcome& o) { return o.fault != Fault::none; });
    Fault fault = faulty == sampled ? Fault::none : faulty->fault;
    int64_t count = 0;
    if (fault == Fault::none) {
      // A drafted token is accepted if the row samples the same one. A fault after accepted tokens recurs,
      // and is reported, when its position is the first.
      while (count < row.num_sampled && sampled[count].fault == Fault::none) {
        results.token_ids.push_back(sampled[count++].token);
        if (count == row.num_sampled || sampled[count - 1].token != row.drafted[count - 1]) break;
      }
      if (count == 0 && row.num_sampled > 0) fault = sampled->fault;
      slot.extend(slot.history, results.token_ids.data() + results.token_ids.size() - count, count);
      std::for_each(scored, sampled, list);
      if (slot.params.logprobs) std::for_each(sampled, sampled + count, list);
    }
    results.counts.push_back(count);
    results.faults.push_back((int64_t)fault);
    results.scored.push_back(faulty == sampled ? row.num_scored : 0);
    results.listed.push_back(slot.params.logprobs ? count : 0);
    results.plain &= count == 1 && row.num_scored == 0 && !slot.params.logprobs;
  }
  for (size_t i = 0; i < tasks_.size(); ++i) {
    empty(outcomes_[i].ids);
    empty(outcomes_[i].logprobs);
  }
}

}  // namespace quire

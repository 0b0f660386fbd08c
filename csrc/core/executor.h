// The executor of a program: ops over buffers, a whole step per call.
//
// Ops are grouped into phases. Consecutive row-wise ops (norms, rotations, packing) form one phase: a thread
// processes 8 rows through all of them while they are in its cache. A product or attention is a separate
// phase. Threads take tasks of a phase from a counter, and synchronize at its end. Each of several nodes has
// a range of the tasks, with a counter: a thread takes those of its own node first, then helps the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "../kernels/kernels.h"
#include "memory.h"
#include "thread_pool.h"

namespace quire {

// A copy, kept as `snapshot`, of the state of a slot in a cache group before it computes `position`.
struct Snapshot {
  int64_t slot, group, position, snapshot;
};

class Adapter;  // adapters.h

// One step as arrays, as in quire.program.batch. Borrowed for the duration of a run.
struct Batch {
  int64_t tokens, sequences, logits;
  const int64_t* token_ids;                  // [tokens]
  const int64_t* positions;                  // [tokens]
  const int64_t* row_offsets;                // [sequences + 1]
  const int64_t* const* tables;              // [groups, sequences], block tables
  const int64_t* slots;                      // [sequences]
  const int64_t* variants;                   // [sequences]
  const int64_t* logit_rows;                 // [logits]
  std::span<const Snapshot> restored = {};   // restored before any row begins
  std::span<const Snapshot> saved = {};      // saved as rows pass their positions
  const Adapter* const* adapters = nullptr;  // [sequences], null where a row has none; or null
  const float* hidden = nullptr;             // [tokens, width], of the position before each token; or patches
  const int64_t* rotary = nullptr;           // [tokens, 3], positions by which tokens rotate; or null
  // Tokens of images, ascending, and what the tower gave for each.
  std::span<const int64_t> image_tokens = {};
  const float* const* image_rows = nullptr;
  // [tokens], the ends of what tokens see, where some see more than the positions up to their own; or null.
  const int64_t* visible_ends = nullptr;
  // The same tokens with the windows of a tower as sequences; or null.
  const Batch* windows = nullptr;

  const int64_t* table(int64_t group, int64_t sequence) const { return tables[group * sequences + sequence]; }
};

enum class Count : int32_t { tokens, logits };

// The context of a running step, for its ops.
class Step {
 public:
  Step(const Batch& batch, const Kernels& kernels, const Nodes& nodes, std::vector<float*> buffers)
      : batch(batch), kernels(kernels), nodes(nodes), buffers(std::move(buffers)), threads(nodes.threads()) {}

  const Batch& batch;
  const Kernels& kernels;
  const Nodes& nodes;
  std::vector<float*> buffers;
  const int threads;

  int64_t count(Count of) const { return of == Count::tokens ? batch.tokens : batch.logits; }
};

class Op {
 public:
  virtual ~Op() = default;

  // Called once, by one thread, before any task of the step: allocates scratch, builds shared tables.
  virtual void prepare(const Step&) {}

  // Row-wise ops define the count of their rows, and compute rows [first, last).
  virtual bool row_wise() const { return false; }
  virtual Count rows() const { return Count::tokens; }
  virtual void run_rows(const Step&, int64_t first, int64_t last) { (void)first, (void)last; }

  // Other ops define their number of tasks, and compute one.
  virtual int64_t tasks(const Step&) const { return 0; }
  virtual void run(const Step&, int64_t task, int thread) { (void)task, (void)thread; }
  // The first task of a node, or their number for the node after the last. Called if there are any.
  virtual int64_t first_task(const Step& step, int node) const { return step.nodes.first(tasks(step), node); }

  // Operations, as far as they matter: by them a step that is computed in parts is divided.
  virtual double operations(const Step&) const { return 0; }
};

class Executor {
 public:
  // Programs that never run at the same time may share their threads.
  Executor(const Kernels& kernels, std::shared_ptr<ThreadPool> pool)
      : kernels_(kernels), pool_(std::move(pool)) {}

  // Adds a buffer of `width` floats per row; returns its number.
  int64_t add_buffer(Count count, int64_t width);
  void add(std::unique_ptr<Op> op);

  // Computes a step; returns the start of buffer `output`, valid until the next run.
  float* run(const Batch& batch, int64_t output);

  // The same in parts: `begin` prepares a step, and each `advance` computes until `share` of its operations
  // are done, all if it is 1. The batch must live until then. Parts end between tasks: bits are the same.
  void begin(const Batch& batch);
  void advance(double share);

  // Returns the start of a buffer of the last run, valid until the next one.
  const float* buffer(int64_t number) const { return buffers_.at((size_t)number).memory.as<float>(); }

  const Kernels& kernels() const { return kernels_; }
  ThreadPool& pool() { return *pool_; }
  const std::shared_ptr<ThreadPool>& shared_pool() const { return pool_; }

 private:
  struct Buffer {
    Count count;
    int64_t width;
    Memory memory;
  };
  struct Phase {
    std::vector<Op*> ops;
    bool row_wise;
    Count rows;
  };

  // A place between tasks: so many of a phase are done, and all of those before it.
  struct Place {
    size_t phase;
    int64_t tasks;
  };

  Place place_at(double share) const;
  void work(Place end, int thread);
  int64_t tasks(const Phase& phase, const Step& step) const;
  void take(size_t phase, int64_t count, int thread);
  void run(const Phase& phase, const Step& step, int64_t task, int thread);
  // Where `first_` and `taken_` have the number of a node, which shares no cache line with another one.
  size_t index(size_t phase, int node) const { return (size_t)node * (num_tasks_.size() + kLine) + phase; }

  static constexpr size_t kLine = 64 / sizeof(int64_t);
  const Kernels& kernels_;
  std::shared_ptr<ThreadPool> pool_;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Phase> phases_;
  std::optional<Step> step_;
  Place done_{0, 0};                               // of this step
  std::vector<int64_t> num_tasks_;                 // of each phase of this step
  std::vector<int64_t> first_;                     // the first task of each phase and node
  std::unique_ptr<std::atomic<int64_t>[]> taken_;  // the task that is taken next of these
};

}  // namespace quire

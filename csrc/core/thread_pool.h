// Threads that compute a step together and sleep between steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "nodes.h"

namespace quire {

// Pins the calling thread to some processors for the lifetime of this object; does nothing if it may not use
// all of them.
class Pinning {
 public:
  explicit Pinning(const cpu_set_t& processors);
  ~Pinning();
  Pinning(const Pinning&) = delete;
  Pinning& operator=(const Pinning&) = delete;

 private:
  cpu_set_t before_;
  bool moved_ = false;
};

// Seconds of the steady clock, as time.monotonic.
double now();

// The time that the calling thread, which does not sleep, waited for a core: wall time less the time it ran.
class CoreWait {
 public:
  // Begins anew: the thread has slept, and had work since `wall_s`.
  void begin(double wall_s);
  // Returns the seconds since the last call or `begin`. A time too short for another thread to have taken the
  // core is left for the next call: reading the time that a thread ran is slow.
  double take();

 private:
  double wall_s_ = 0, ran_s_ = 0;
};

// Within `run`, threads synchronize at spinning barriers; between runs they spin briefly, because the next
// step is usually near, and then sleep. If there are as many threads as cores, each is pinned to its own
// core: otherwise, when other programs need a processor briefly, the kernel might put two threads on one
// core, and all would wait for these at every barrier. On several nodes each is pinned to its own node at
// least, whose memory has what it reads.
class ThreadPool {
 public:
  explicit ThreadPool(Nodes nodes);
  explicit ThreadPool(int threads) : ThreadPool(Nodes(threads)) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  const Nodes& nodes() const { return nodes_; }

  // Calls work(thread) on every thread, where the caller is thread 0; returns when all have returned. Throws
  // the first exception of a thread. Work with barriers attempts what may throw: every thread reaches them.
  void run(const std::function<void(int)>& work);

  // Calls a part of a run's work, unless a thread has thrown: what this part throws ends the run.
  template <typename Part>
  void attempt(const Part& part) {
    if (!failed_.load(std::memory_order_relaxed)) guard(part);
  }

  // Waits for every thread of the run. Writes before the barrier are visible after it.
  void barrier();

  // Returns how long the thread that waited longest for a core did so in the runs since the last call, in
  // seconds. The thread that calls `run` is not counted.
  double take_core_wait();

 private:
  struct alignas(64) Waited {
    double seconds = 0;
  };

  // Calls some work, and notes what it throws.
  template <typename Work>
  void guard(const Work& work) {
    try {
      work();
    } catch (...) {
      fail(std::current_exception());
    }
  }
  void loop(int thread);
  void end();
  void fail(std::exception_ptr error);

  const Nodes nodes_;
  const int size_;
  const std::function<void(int)>* work_ = nullptr;
  double began_s_ = 0;          // this run
  std::vector<Waited> waited_;  // by thread
  std::mutex failing_;
  std::exception_ptr error_;  // the first of this run
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<uint32_t> runs_{0};      // counts runs
  alignas(64) std::atomic<int> running_{0};        // threads that have not finished this run
  alignas(64) std::atomic<int> arrived_{0};        // threads at the barrier
  alignas(64) std::atomic<uint32_t> barriers_{0};  // counts barriers passed
  alignas(64) std::atomic<bool> over_{false};
  std::vector<std::thread> threads_;
};

}  // namespace quire

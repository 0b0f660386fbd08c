// A few threads that work on a step together and rest between steps.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace quire {

// Keeps the calling thread, while it lives, on some of the processors that it may use; where it may not use
// them all, nothing happens.
class Place {
 public:
  explicit Place(const cpu_set_t& processors);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

 private:
  cpu_set_t before_;
  bool moved_ = false;
};

// Inside `run` threads meet at barriers without the kernel's help; between runs they spin for a moment,
// because the next step is usually near, and then sleep. A pool of as many threads as there are cores gives
// each its own: when others need a processor for a moment, the kernel might put two of these on one, and all
// would wait for them at every barrier.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Calls work(thread) on every thread, the caller's being number 0; returns when all have returned.
  void run(const std::function<void(int)>& work);

  // Waits until every thread of the run is here. What was written before it is seen after it.
  void barrier();

 private:
  void live(int thread);

  const int size_;
  std::vector<cpu_set_t> cores_;  // of each thread; empty if threads may go where they like
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<uint32_t> runs_{0};      // counts runs
  alignas(64) std::atomic<int> running_{0};        // threads that have not finished this run
  alignas(64) std::atomic<int> arrived_{0};        // threads at the barrier
  alignas(64) std::atomic<uint32_t> barriers_{0};  // counts barriers passed
  alignas(64) std::atomic<bool> over_{false};
  std::vector<std::thread> threads_;
};

// The physical cores this process may use: its affinity and the quota of its control group are kept to.
int usable_cores();

}  // namespace quire

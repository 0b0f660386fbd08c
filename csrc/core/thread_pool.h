// A few threads that work on a step together and rest between steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace quire {

// Inside `run` threads meet at barriers without the kernel's help; between runs they spin for a moment,
// because the next step is usually near, and then sleep.
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

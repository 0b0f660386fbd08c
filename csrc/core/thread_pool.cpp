#include "thread_pool.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

namespace quire {

namespace {

constexpr int kSpins = 1 << 12;     // polls of a barrier before yielding the processor
constexpr int kIdleSpins = 1 << 5;  // polls between steps before a thread looks at the clock
constexpr double kIdle_s = 5e-4;    // and sleeps if it has waited longer than this
constexpr double kSlice_s = 5e-5;   // a thread that takes a core keeps it longer than this

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns the seconds that the calling thread has run.
double ran() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

}  // namespace

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void CoreWait::begin(double wall_s) {
  wall_s_ = wall_s;
  ran_s_ = ran() - std::min(now() - wall_s, kSlice_s);  // waking up is not counted
}

double CoreWait::take() {
  const double wall_s = now();
  if (wall_s - wall_s_ < kSlice_s) return 0;
  const double ran_s = ran();
  const double waited_s = (wall_s - wall_s_) - (ran_s - ran_s_);
  wall_s_ = wall_s;
  ran_s_ = ran_s;
  return std::max(waited_s, 0.0);
}

Pinning::Pinning(const cpu_set_t& processors) {
  cpu_set_t both;
  if (sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
  CPU_AND(&both, &before_, &processors);
  moved_ = CPU_EQUAL(&both, &processors) && sched_setaffinity(0, sizeof(processors), &processors) == 0;
}

Pinning::~Pinning() {
  if (moved_) sched_setaffinity(0, sizeof(before_), &before_);
}

ThreadPool::ThreadPool(Nodes nodes)
    : nodes_(std::move(nodes)), size_(nodes_.threads()), waited_((size_t)nodes_.threads()) {
  try {
    for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { loop(i); });
  } catch (...) {  // the system grants no more threads
    end();
    throw;
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  over_.store(true);
  runs_.fetch_add(1);
  runs_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& work) {
  if (size_ > 1) {
    work_ = &work;
    began_s_ = now();
    running_.store(size_ - 1, std::memory_order_relaxed);
    runs_.fetch_add(1, std::memory_order_release);
    runs_.notify_all();
  }
  std::optional<Pinning> pinning;
  if (!nodes_.processors().empty()) pinning.emplace(nodes_.processors()[0]);
  guard([&] { work(0); });  // even if another thread has failed: all meet at barriers
  for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins)
    spins < kSpins ? relax() : (void)sched_yield();
  if (failed_.exchange(false)) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::fail(std::exception_ptr error) {
  const std::lock_guard lock(failing_);
  if (!failed_.exchange(true)) error_ = std::move(error);
}

void ThreadPool::loop(int thread) {
  std::optional<Pinning> pinning;
  if (!nodes_.processors().empty()) pinning.emplace(nodes_.processors()[(size_t)thread]);
  uint32_t seen = 0;
  CoreWait wait;
  for (;;) {
    bool slept = seen == 0;
    const double idle_s = now();
    for (int spins = 1; runs_.load(std::memory_order_acquire) == seen; ++spins) {
      if (spins % kIdleSpins || now() - idle_s < kIdle_s) {
        relax();
      } else {
        runs_.wait(seen, std::memory_order_acquire);
        slept = true;
      }
    }
    if (over_.load()) return;
    ++seen;
    if (slept) wait.begin(began_s_);
    guard([&] { (*work_)(thread); });
    waited_[(size_t)thread].seconds += std::min(wait.take(), now() - began_s_);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

double ThreadPool::take_core_wait() {
  double longest_s = 0;
  for (Waited& waited : waited_) longest_s = std::max(longest_s, std::exchange(waited.seconds, 0.0));
  return longest_s;
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const uint32_t round = barriers_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    barriers_.store(round + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; barriers_.load(std::memory_order_acquire) == round; ++spins)
    spins < kSpins ? relax() : (void)sched_yield();
}

}  // namespace quire

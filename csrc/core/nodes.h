// The NUMA nodes whose processors compute: the threads of each, and its share of the work.
#pragma once

#include <sched.h>

#include <cstdint>
#include <string>
#include <vector>

namespace quire {

constexpr const char* kSystem = "/sys/devices/system";

// The processors that the calling thread may use.
cpu_set_t allowed_processors();

// The number of physical cores within the affinity of this process.
int num_cores();

// Threads are numbered node by node. Only nodes with threads count; there is always one at least.
class Nodes {
 public:
  // Spreads threads over the nodes of `processors` in proportion to their cores, as `system` describes them.
  // If there are as many threads as cores, each has a core of its own; otherwise, if several nodes have
  // threads, each thread has the processors of its node.
  explicit Nodes(int threads, const cpu_set_t& processors = allowed_processors(),
                 const std::string& system = kSystem);
  // So many threads on each of nodes 0, 1, ..., which run on any processor.
  static Nodes of(const std::vector<int>& threads);

  int count() const { return (int)ids_.size(); }
  int threads() const { return (int)nodes_.size(); }
  int of_thread(int thread) const { return nodes_[(size_t)thread]; }
  // The processors of each thread; empty if threads run where the system puts them.
  const std::vector<cpu_set_t>& processors() const { return processors_; }
  // The number that the system gives each node.
  const std::vector<int>& ids() const { return ids_; }

  // Divides `total` things among nodes in proportion to their threads: returns the first one of `node`, or
  // `total` for the node after the last.
  int64_t first(int64_t total, int node) const {
    if (node == 0 || node == count()) return node ? total : 0;  // without a division
    return total * before_[(size_t)node] / threads();
  }

 private:
  Nodes() = default;
  void add(int id, int threads);

  std::vector<int> ids_, nodes_;       // by node; by thread
  std::vector<int64_t> before_ = {0};  // threads of the nodes before each, and of all
  std::vector<cpu_set_t> processors_;  // by thread, or empty
};

}  // namespace quire

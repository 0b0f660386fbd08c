// Bindings of the NUMA nodes that compute, and of the placement of weights on them.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/executor.h"
#include "core/isa.h"
#include "core/nodes.h"
#include "core/placement.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ranges = std::vector<std::tuple<uintptr_t, uintptr_t, int>>;  // first, last, node

Nodes nodes_of(int threads, const std::optional<std::vector<int>>& processors, const std::string& system) {
  if (!processors) return Nodes(threads, allowed_processors(), system);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  for (const int cpu : *processors) CPU_SET((size_t)cpu, &allowed);
  return Nodes(threads, allowed, system);
}

std::vector<int> processors_of(const Nodes& nodes, int thread) {
  std::vector<int> found;
  if (nodes.processors().empty()) return found;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &nodes.processors().at((size_t)thread))) found.push_back(cpu);
  return found;
}

Ranges ranges_of(const std::vector<NodeBytes>& all) {
  Ranges found;
  for (const NodeBytes& one : all) found.emplace_back(one.first, one.last, one.node);
  return found;
}

Ranges divided(uintptr_t first, uintptr_t last, const Ranges& read, int nodes) {
  std::vector<NodeBytes> all;
  for (const auto& [begin, end, node] : read) all.push_back({begin, end, node});
  return ranges_of(divide_pages(first, last, all, nodes));
}

// An op that records which thread takes which task, while others come to take theirs.
class Recorded : public Op {
 public:
  Recorded(int64_t tasks, int threads) : taken((size_t)threads), tasks_(tasks) {}
  int64_t tasks(const Step&) const override { return tasks_; }
  void run(const Step&, int64_t task, int thread) override {
    taken[(size_t)thread].push_back(task);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  double operations(const Step&) const override { return 1; }

  std::vector<std::vector<int64_t>> taken;  // by thread, in order

 private:
  int64_t tasks_;
};

std::vector<std::vector<int64_t>> record(const Nodes& nodes, int64_t tasks,
                                         const std::vector<double>& shares) {
  Executor executor(*available_kernels().back(), std::make_shared<ThreadPool>(nodes));
  auto op = std::make_unique<Recorded>(tasks, nodes.threads());
  const Recorded& recorded = *op;
  executor.add(std::move(op));
  const Batch batch{};
  executor.begin(batch);
  for (const double share : shares) executor.advance(share);
  return recorded.taken;
}

}  // namespace

}  // namespace quire

void bind_nodes(nb::module_& m) {
  using namespace quire;
  m.attr("HUGE_PAGE") = kHugePage;
  m.def("num_cores", &num_cores, "Physical cores within the affinity of this process.");
  nb::class_<Nodes>(m, "Nodes", "The NUMA nodes that compute, numbered from 0, with the threads of each.")
      .def(nb::new_(&nodes_of), "threads"_a, "processors"_a = nb::none(), "system"_a = kSystem,
           "Threads on the nodes of this machine; tests pass processors, and a folder that describes them.")
      .def_static("of", &Nodes::of, "threads"_a, "So many threads on each of some nodes, on any processor.")
      .def_prop_ro("count", &Nodes::count)
      .def_prop_ro("num_threads", &Nodes::threads)
      .def_prop_ro("ids", &Nodes::ids, "The numbers that the system gives them.")
      .def("of_thread", &Nodes::of_thread, "thread"_a)
      .def("processors", &processors_of, "thread"_a, "The processors it is pinned to; none if to none.")
      .def("first", &Nodes::first, "total"_a, "node"_a,
           "The first of `total` things, divided by threads, that belongs to a node.")
      .def(
          "section",
          [](const Nodes& self, const Matrix& matrix, int node) {
            const Section own = matrix.section(self, node);
            return std::tuple(own.first_matrix, own.last_matrix, own.first_panel, own.last_panel);
          },
          "matrix"_a, "node"_a, "The matrices and panels that a node multiplies, as (first, last) of each.")
      .def(
          "bytes",
          [](const Nodes& self, const Matrix& matrix) { return ranges_of(bytes_by_node(matrix, self)); },
          "matrix"_a, "Ranges (first, last, node) of the addresses that the threads of each node read.")
      .def("record", &record, "tasks"_a, "shares"_a, nb::call_guard<nb::gil_scoped_release>(),
           "The tasks that each thread takes, in order, for tests: in parts that end at these shares.")
      .def(
          "place",
          [](const Nodes& self, Bytes memory, const std::vector<std::shared_ptr<const Matrix>>& weights) {
            place(memory.data(), memory.size(), weights, self);
          },
          "memory"_a, "weights"_a,
          "Have the pages of new memory near the threads that multiply `weights` in it.");
  m.def("divide_pages", &divided, "first"_a, "last"_a, "read"_a, "nodes"_a,
        "Divide memory by huge pages among the nodes that read most of each; see Nodes.bytes.");
}

#include "nodes.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

namespace quire {

namespace {

// A physical core: those of its processors that may be used, and its node.
struct Core {
  cpu_set_t processors;
  int node;
};

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Calls `use` with each number of a list as Linux writes it: 0-3,8.
template <typename Use>
void each_number(const std::string& list, const Use& use) {
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0, last = 0;
    char dash = 0;
    std::istringstream numbers(part);
    if (!(numbers >> first)) continue;
    if (!(numbers >> dash >> last)) last = first;
    for (int number = first; number <= last; ++number) use(number);
  }
}

// Returns the node of each processor that belongs to one.
std::map<int, int> nodes_of_processors(const std::string& system) {
  std::map<int, int> found;
  std::error_code error;
  for (const auto& folder : std::filesystem::directory_iterator(system + "/node", error)) {
    const std::string name = folder.path().filename();
    if (name.size() < 5 || name.compare(0, 4, "node") != 0) continue;
    if (name.find_first_not_of("0123456789", 4) != std::string::npos) continue;
    each_number(first_line(folder.path() / "cpulist"),
                [&](int cpu) { found[cpu] = std::stoi(name.substr(4)); });
  }
  return found;
}

// Returns the physical cores of these processors, by node and then by number; empty if unknown.
std::vector<Core> cores(const cpu_set_t& allowed, const std::string& system) {
  const std::map<int, int> nodes = nodes_of_processors(system);
  std::vector<Core> found;
  std::map<std::string, size_t> known;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const std::string topology = system + "/cpu/cpu" + std::to_string(cpu) + "/topology/";
    std::string core = first_line(topology + "core_cpus_list");
    if (core.empty()) core = first_line(topology + "thread_siblings_list");  // its name before Linux 5.2
    const auto [place, is_new] = known.emplace(core.empty() ? std::to_string(cpu) : core, found.size());
    if (is_new) {
      const auto node = nodes.find(cpu);
      found.push_back({{}, node == nodes.end() ? 0 : node->second});
      CPU_ZERO(&found.back().processors);
    }
    CPU_SET(cpu, &found[place->second].processors);
  }
  std::stable_sort(found.begin(), found.end(), [](const Core& a, const Core& b) { return a.node < b.node; });
  return found;
}

}  // namespace

cpu_set_t allowed_processors() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) CPU_ZERO(&allowed);
  return allowed;
}

int num_cores() {
  const size_t found = cores(allowed_processors(), kSystem).size();
  return found ? (int)found : (int)std::max(1u, std::thread::hardware_concurrency());
}

Nodes::Nodes(int threads, const cpu_set_t& processors, const std::string& system) {
  threads = std::max(1, threads);
  const std::vector<Core> all = cores(processors, system);
  const int64_t num_cores = (int64_t)all.size();
  std::vector<cpu_set_t> of_nodes;  // those with threads
  for (size_t begin = 0, end; begin < all.size(); begin = end) {
    cpu_set_t own;
    CPU_ZERO(&own);
    for (end = begin; end < all.size() && all[end].node == all[begin].node; ++end)
      CPU_OR(&own, &own, &all[end].processors);
    const int64_t until = (2 * threads * (int64_t)end + num_cores) / (2 * num_cores);  // rounded
    if (until == before_.back()) continue;
    add(all[begin].node, (int)(until - before_.back()));
    of_nodes.push_back(own);
  }
  if (ids_.empty()) add(0, threads);
  if (threads > 1 && threads == num_cores) {
    for (const Core& core : all) processors_.push_back(core.processors);
  } else if (count() > 1) {
    for (const int node : nodes_) processors_.push_back(of_nodes[(size_t)node]);
  }
}

Nodes Nodes::of(const std::vector<int>& threads) {
  Nodes nodes;
  for (size_t id = 0; id < threads.size(); ++id)
    if (threads[id] > 0) nodes.add((int)id, threads[id]);
  if (nodes.ids_.empty()) nodes.add(0, 1);
  return nodes;
}

void Nodes::add(int id, int threads) {
  nodes_.insert(nodes_.end(), (size_t)threads, count());
  ids_.push_back(id);
  before_.push_back((int64_t)nodes_.size());
}

}  // namespace quire

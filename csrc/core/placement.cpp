#include "placement.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace quire {

namespace {

// Each range is a mapping, of which Linux allows a process 65,530 by default.
constexpr size_t kMostRanges = size_t(1) << 14;
constexpr size_t kNodeBits = 1024;  // most nodes that Linux knows

// Sets the policy of new pages. Both policies used here take other nodes where these have no memory left.
void ask(uintptr_t first, uintptr_t last, int policy, const std::vector<int>& ids) {
  constexpr size_t kWord = 8 * sizeof(unsigned long);
  unsigned long mask[kNodeBits / kWord] = {};
  for (const int id : ids)
    if ((size_t)id < kNodeBits) mask[(size_t)id / kWord] |= 1ul << ((size_t)id % kWord);
  (void)syscall(SYS_mbind, first, last - first, policy, mask, kNodeBits + 1, 0);  // may be refused
}

}  // namespace

std::vector<NodeBytes> bytes_by_node(const Matrix& matrix, const Nodes& nodes) {
  std::vector<NodeBytes> found;
  for (int node = 0; node < nodes.count(); ++node) {
    const Section own = matrix.section(nodes, node);
    const auto add = [&](const void* base, int64_t panel_bytes) {
      const uintptr_t begin = (uintptr_t)base;
      found.push_back({begin + (uintptr_t)(own.first_panel * panel_bytes),
                       begin + (uintptr_t)(own.last_panel * panel_bytes), node});
    };
    for (int64_t index = own.first_matrix; index < own.last_matrix; ++index) {
      const Panels p = matrix.panels(index);
      add(p.values, p.panel_bytes());
      if (!p.quantized()) continue;
      add(p.block_scales, p.groups() * kPanel);
      add(p.channels, kPanel * (int64_t)sizeof(float));
    }
  }
  return found;
}

std::vector<NodeBytes> divide_pages(uintptr_t first, uintptr_t last, const std::vector<NodeBytes>& read,
                                    int nodes) {
  const uintptr_t begin = first / kHugePage, count = (last - 1) / kHugePage + 1 - begin;
  std::vector<int64_t> bytes(count * (size_t)nodes);  // [pages, nodes]
  for (const NodeBytes& one : read)
    for (uintptr_t at = one.first; at < one.last;) {
      const uintptr_t page = at / kHugePage, end = std::min(one.last, (page + 1) * kHugePage);
      bytes[(page - begin) * (size_t)nodes + (size_t)one.node] += (int64_t)(end - at);
      at = end;
    }
  std::vector<NodeBytes> found;
  for (uintptr_t page = 0; page < count; ++page) {
    const auto own = bytes.begin() + (int64_t)page * nodes, most = std::max_element(own, own + nodes);
    const uintptr_t end = std::min(last, (begin + page + 1) * kHugePage);
    const int node = *most || found.empty() ? (int)(most - own) : found.back().node;
    if (!found.empty() && found.back().node == node) {
      found.back().last = end;
    } else {
      found.push_back({std::max(first, (begin + page) * kHugePage), end, node});
    }
  }
  return found;
}

void place(const void* memory, size_t bytes, const std::vector<std::shared_ptr<const Matrix>>& weights,
           const Nodes& nodes) {
  if (nodes.count() == 1 || bytes == 0) return;
  std::vector<NodeBytes> read;
  for (const auto& weight : weights) {
    const std::vector<NodeBytes> own = bytes_by_node(*weight, nodes);
    read.insert(read.end(), own.begin(), own.end());
  }
  const uintptr_t first = (uintptr_t)memory;
  const std::vector<NodeBytes> ranges = divide_pages(first, first + bytes, read, nodes.count());
  if (ranges.size() > kMostRanges) return;
  for (const NodeBytes& one : ranges)
    ask(one.first, one.last, MPOL_PREFERRED, {nodes.ids()[(size_t)one.node]});
}

void spread(const Memory& memory, const Nodes& nodes) {
  if (nodes.count() == 1 || memory.bytes() == 0) return;
  const uintptr_t first = (uintptr_t)memory.as();
  ask(first, first + memory.bytes(), MPOL_INTERLEAVE, nodes.ids());
}

}  // namespace quire

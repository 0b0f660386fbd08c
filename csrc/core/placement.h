// Where memory lies: weights on the nodes whose threads multiply them, caches on all nodes by turns. With one
// node nothing is asked of the system; where it refuses, pages lie where they are written first.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "matrix.h"
#include "nodes.h"

namespace quire {

constexpr uintptr_t kHugePage = uintptr_t(2) << 20;  // bytes

// The bytes from `first` to `last` [addresses], and the node whose threads read them.
struct NodeBytes {
  uintptr_t first, last;
  int node;
};

// Returns the bytes of a weight that are multiplied by the threads of each node.
std::vector<NodeBytes> bytes_by_node(const Matrix& matrix, const Nodes& nodes);

// Divides the memory from `first` to `last` [addresses] among nodes. Each huge page goes whole to the node
// that reads most of its bytes, and one that none reads to that of the page before.
std::vector<NodeBytes> divide_pages(uintptr_t first, uintptr_t last, const std::vector<NodeBytes>& read,
                                    int nodes);

// Asks for each page of new memory on the node whose threads multiply most of what it will hold.
void place(const void* memory, size_t bytes, const std::vector<std::shared_ptr<const Matrix>>& weights,
           const Nodes& nodes);

// Asks for the pages of new memory on all nodes by turns: for what any thread reads.
void spread(const Memory& memory, const Nodes& nodes);

}  // namespace quire

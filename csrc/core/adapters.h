// Adapters of rows: what they add to products (quire.program.ops.linear.Linear).
#pragma once

#include <memory>
#include <vector>

#include "ops.h"

namespace quire {

// The matrices of an adapter for one product, at place `site` of its program.
struct AdapterShape {
  int64_t site;
  Format format;  // f32, f16 or bf16
  int64_t rank, inputs, outputs;
  float scale;
};

// The matrices of one adapter, all in one memory. Slots that use it keep it alive.
class Adapter : public std::enable_shared_from_this<Adapter> {
 public:
  // Adds scale * up (down x) to a product; without matrices, nothing.
  struct Part {
    std::shared_ptr<Matrix> down, up;  // [rank, inputs], [outputs, rank]
    float scale = 0;
  };

  // Allocates zeros, to be filled by packing, for a program with so many sites.
  Adapter(int64_t sites, const std::vector<AdapterShape>& shapes);

  const Part& part(int64_t site) const { return parts_.at((size_t)site); }
  int64_t nbytes() const { return (int64_t)memory_.bytes(); }

 private:
  Memory memory_;
  std::vector<Part> parts_;  // by site
};

// Rows of a step that have the same adapter.
struct AdapterTile {
  const Adapter* adapter;
  int64_t count;
  int64_t rows[kTile];
};

// Finds the tiles of each step, for all ops that add adapters to rows of this count.
class AdapterTiles : public Op {
 public:
  explicit AdapterTiles(Count count) : count_(count) {}
  void prepare(const Step& step) override;
  bool row_wise() const override { return true; }
  Count rows() const override { return count_; }

  Count count() const { return count_; }
  const std::vector<AdapterTile>& tiles() const { return tiles_; }

 private:
  void append(const Adapter* adapter, int64_t row);

  Count count_;
  std::vector<AdapterTile> tiles_;
};

// Adds to products of one value what the adapters of its rows say. The bits of a row depend on no other row.
class AddAdapters : public Op {  // a task: one tile, or with few tiles one product of it
 public:
  struct Target {
    int64_t out, site;
  };
  AddAdapters(const AdapterTiles* tiles, int64_t x, int64_t width, std::vector<Target> targets)
      : tiles_(tiles), x_(x), width_(width), targets_(std::move(targets)) {}
  int64_t tasks(const Step& step) const override;
  void run(const Step& step, int64_t task, int thread) override;

 private:
  bool apart(const Step& step) const;
  void add(const Step& step, const AdapterTile& tile, size_t first, size_t last) const;

  const AdapterTiles* tiles_;
  int64_t x_, width_;
  std::vector<Target> targets_;
};

}  // namespace quire

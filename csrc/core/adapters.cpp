#include "adapters.h"

#include <algorithm>
#include <cstring>

namespace quire {

namespace {

constexpr int64_t kFetched = 4096;     // bytes of a matrix that are fetched before it is used
constexpr int64_t kTilesOfThread = 4;  // with fewer tiles, their products are tasks of their own

int64_t matrix_bytes(Format format, int64_t outputs, int64_t inputs) {
  return round_up(Matrix(format, Coding(), 1, outputs, inputs, nullptr).nbytes(), kAlignment);
}

// Memory of a thread for the rows of one tile.
struct TileMemory {
  Memory rows, hidden, added, packed, packed_hidden;

  static float* floats(Memory& memory, int64_t width) {
    memory.reserve((size_t)(kTile * width) * sizeof(float));
    return memory.as<float>();
  }
};

// Packs x [count, inputs] for products with a matrix.
PackedActivations pack(const Step& step, const Matrix& matrix, const float* x, int64_t count,
                       Memory& memory) {
  const ActivationFormat format = step.kernels.activation_format(matrix.panels());
  memory.reserve((size_t)(kTile * PackedActivations::row_bytes(format, matrix.inputs())));
  const PackedActivations packed{format, count, matrix.inputs(), memory.as<uint8_t>()};
  step.kernels.pack_activations(packed, x, matrix.inputs(), 0);
  return packed;
}

// out [count, outputs] = packed activations times the matrix transposed. Meanwhile the beginning of the next
// matrix, if there is one, is fetched: each row of a step may have an adapter of its own, read once.
void multiply(const Step& step, const Matrix& matrix, const PackedActivations& packed, float* out,
              const Matrix* next) {
  if (next)
    for (int64_t at = 0; at < std::min<int64_t>(next->nbytes(), kFetched); at += 64)
      __builtin_prefetch(next->data() + at);
  const Product product{matrix.panels(), nullptr, nullptr, Activation::none, out, matrix.outputs()};
  step.kernels.multiply(product, packed, 0, product.weight.panels());
}

}  // namespace

Adapter::Adapter(int64_t sites, const std::vector<AdapterShape>& shapes) : parts_((size_t)sites) {
  int64_t total = 0;
  for (const AdapterShape& of : shapes)
    total += matrix_bytes(of.format, of.rank, of.inputs) + matrix_bytes(of.format, of.outputs, of.rank);
  memory_ = Memory((size_t)total);
  uint8_t* next = memory_.as<uint8_t>();
  const auto take = [&](Format format, int64_t outputs, int64_t inputs) {
    uint8_t* data = next;
    next += matrix_bytes(format, outputs, inputs);
    return std::make_shared<Matrix>(format, Coding(), 1, outputs, inputs, data);
  };
  for (const AdapterShape& of : shapes) {
    Part& part = parts_.at((size_t)of.site);
    part.down = take(of.format, of.rank, of.inputs);
    part.up = take(of.format, of.outputs, of.rank);
    part.scale = of.scale;
  }
}

void AdapterTiles::append(const Adapter* adapter, int64_t row) {
  // The last tile of an adapter is near the end, since rows of a sequence follow each other.
  const auto last = std::find_if(tiles_.rbegin(), tiles_.rend(),
                                 [&](const AdapterTile& tile) { return tile.adapter == adapter; });
  if (last == tiles_.rend() || last->count == kTile) {
    tiles_.push_back({adapter, 1, {row}});
  } else {
    last->rows[last->count++] = row;
  }
}

void AdapterTiles::prepare(const Step& step) {
  const Batch& batch = step.batch;
  tiles_.clear();
  if (batch.adapters == nullptr) return;
  if (count_ == Count::tokens) {
    for (int64_t s = 0; s < batch.sequences; ++s)
      for (int64_t t = batch.row_offsets[s]; batch.adapters[s] && t < batch.row_offsets[s + 1]; ++t)
        append(batch.adapters[s], t);
    return;
  }
  const int64_t* ends = batch.row_offsets + 1;
  for (int64_t l = 0; l < batch.logits; ++l) {
    const int64_t s = std::upper_bound(ends, ends + batch.sequences, batch.logit_rows[l]) - ends;
    if (batch.adapters[s]) append(batch.adapters[s], l);
  }
}

bool AddAdapters::apart(const Step& step) const {
  return (int64_t)tiles_->tiles().size() < kTilesOfThread * step.threads;
}

int64_t AddAdapters::tasks(const Step& step) const {
  return (int64_t)(tiles_->tiles().size() * (apart(step) ? targets_.size() : 1));
}

void AddAdapters::run(const Step& step, int64_t task, int) {
  if (!apart(step)) return add(step, tiles_->tiles()[(size_t)task], 0, targets_.size());
  const size_t target = (size_t)task % targets_.size();
  add(step, tiles_->tiles()[(size_t)task / targets_.size()], target, target + 1);
}

void AddAdapters::add(const Step& step, const AdapterTile& tile, size_t first, size_t last) const {
  thread_local TileMemory memory;
  PackedActivations packed{};
  for (size_t i = first; i < last; ++i) {
    const Adapter::Part& part = tile.adapter->part(targets_[i].site);
    if (!part.down) continue;
    if (packed.data == nullptr || packed.format != step.kernels.activation_format(part.down->panels())) {
      float* x = TileMemory::floats(memory.rows, width_);
      for (int64_t m = 0; m < tile.count; ++m)
        std::memcpy(x + m * width_, step.buffers[(size_t)x_] + tile.rows[m] * width_,
                    (size_t)width_ * sizeof(float));
      packed = pack(step, *part.down, x, tile.count, memory.packed);
    }
    const int64_t rank = part.down->outputs(), outputs = part.up->outputs();
    float* hidden = TileMemory::floats(memory.hidden, rank);
    float* added = TileMemory::floats(memory.added, outputs);
    multiply(step, *part.down, packed, hidden, part.up.get());
    step.kernels.scale(hidden, part.scale, hidden, tile.count * rank);
    const Matrix* next = i + 1 < last ? tile.adapter->part(targets_[i + 1].site).down.get() : nullptr;
    multiply(step, *part.up, pack(step, *part.up, hidden, tile.count, memory.packed_hidden), added, next);
    for (int64_t m = 0; m < tile.count; ++m) {
      float* out = step.buffers[(size_t)targets_[i].out] + tile.rows[m] * outputs;
      step.kernels.add(out, added + m * outputs, out, outputs);
    }
  }
}

}  // namespace quire

// The memory of the keys and values of one cache group, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "core/attention.h"
#include "core/memory.h"

namespace quire {

namespace nb = nanobind;

inline KVFormat kv_format(const std::string& name) {
  if (name == "float32") return KVFormat::f32;
  if (name == "float16") return KVFormat::f16;
  if (name == "bfloat16") return KVFormat::bf16;
  if (name == "int8") return KVFormat::int8;
  throw nb::value_error(("unknown format of keys and values " + name).c_str());
}

// The keys and values of the `layers` layers of one cache group; or, without `heads`, latents of `dim`
// numbers with values of `value_dim`. Index keys are keys of one head without values. Latents may be entries
// of `every` tokens, `block_size` of them in a block, or one in every `apart`th.
class KVCache {
 public:
  KVCache(int64_t group, const std::string& name, int64_t layers, int64_t num_blocks, int64_t block_size,
          int64_t heads, int64_t dim, int64_t value_dim, int64_t every, int64_t apart)
      : group_(group) {
    const KVFormat format = kv_format(name);
    const bool latent = heads == 0, scaled = format == KVFormat::int8;
    const int64_t bytes = format == KVFormat::f32 ? 4 : scaled ? 1 : 2, each = latent ? 1 : heads;
    const int64_t stride = layers * each, key = latent ? 0 : block_size * dim * bytes;
    const int64_t value = block_size * (latent ? dim : value_dim) * bytes;
    keys_ = Memory((size_t)(num_blocks * stride * key));
    values_ = Memory((size_t)(num_blocks * stride * value));
    if (scaled) {
      if (!latent || dim > value_dim)
        key_scales_ = Memory((size_t)(num_blocks * stride * block_size) * sizeof(float));
      if (value_dim) value_scales_ = Memory((size_t)(num_blocks * stride * block_size) * sizeof(float));
    }
    for (int64_t layer = 0; layer < layers; ++layer) {
      const int64_t first = layer * each;
      layers_.push_back({format, each, dim, value_dim, block_size, stride,
                         latent ? nullptr : keys_.as<uint8_t>() + first * key,
                         values_.as<uint8_t>() + first * value,
                         key_scales_.bytes() ? key_scales_.as<float>() + first * block_size : nullptr,
                         value_scales_.bytes() ? value_scales_.as<float>() + first * block_size : nullptr,
                         latent, every, apart});
    }
  }
  int64_t group() const { return group_; }
  const KVLayer* layer(int64_t index) const { return &layers_.at((size_t)index); }
  // The arrays that hold the content of blocks, each with one equal part for each block.
  std::vector<const Memory*> arrays() const {
    std::vector<const Memory*> found;
    for (const Memory* array : {&keys_, &values_, &key_scales_, &value_scales_})
      if (array->bytes()) found.push_back(array);
    return found;
  }

 private:
  int64_t group_;
  Memory keys_, values_, key_scales_, value_scales_;
  std::vector<KVLayer> layers_;
};

}  // namespace quire

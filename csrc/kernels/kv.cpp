// Writing the keys and values of a token to the cache.

#include "kv.h"

#include "table.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr int32_t kInfinity = 0x7f800000;  // its bits: magnitudes that are not finite are not less

// Returns the largest magnitude; NaN if a number is not finite.
float magnitude(const float* x, int64_t dim) {
  I top{};
  for (int64_t d = 0; d < dim; d += kLanes) top = max(top, (I)abs(load_some(x + d, dim - d)));
  const int32_t bits = reduce_max(top);  // ordered like the numbers; greater if not finite
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  return bits < kInfinity ? largest : __builtin_nanf("");
}

// Writes one head of a token, `stride` apart. Returns true if all numbers are finite when read by attention.
template <KVFormat Form>
QUIRE_INLINE bool write_head(const float* x, int64_t dim, int64_t stride, uint8_t* to, float* scale) {
  using T = typename Stored<Form>::Type;
  float inverse = 1;
  if constexpr (Form == KVFormat::int8) {
    const float largest = magnitude(x, dim);
    *scale = largest / 127.0f;
    inverse = largest > 0 ? 127.0f / largest : 0.0f;
  }
  I top{};
  for (int64_t d = 0; d < dim; d += kLanes) {
    F values = load_some(x + d, dim - d);
    if constexpr (Form == KVFormat::int8) values = inverse > 0 ? values * inverse : F{};
    T narrow[kLanes];
    store_as(narrow, Stored<Form>::narrow(values));
    for (int64_t i = 0; i < least(kLanes, dim - d); ++i) ((T*)to)[(d + i) * stride] = narrow[i];
    F read = load_stored<Form>(narrow);
    if constexpr (Form == KVFormat::int8) read *= *scale;
    top = max(top, (I)abs(read));
  }
  return reduce_max(top) < kInfinity;
}

// Attention gives invisible positions weight zero, but zero times a value that is not finite is not zero: it
// would affect earlier tokens of its chunk, and through them blocks shared by requests. So such a value is
// stored as zeros with NaN as its key, which makes the score and the result NaN only for tokens that see the
// position. A key without a value, of an index, gets the NaN if it is not finite itself, and so does a vector
// that is key and value: it is read by tokens that see it alone.
template <KVFormat Form>
void write_token(const KVLayer& cache, int64_t block, int64_t offset, const float* k, const float* v) {
  constexpr int64_t kBytes = sizeof(typename Stored<Form>::Type);
  const int64_t size = cache.block_size, value_dim = cache.value_dim;
  const int64_t dim = cache.latent ? cache.dim - value_dim : cache.dim;
  const int64_t key_stride = cache.latent ? 1 : size;
  for (int64_t head = 0; head < cache.heads; ++head, k += dim, v += value_dim) {
    const int64_t page = block * cache.stride + head;
    uint8_t* value = cache.values + (page * size + offset) * cache.value_stride() * kBytes;
    uint8_t* key =
        cache.latent ? value + value_dim * kBytes : cache.keys + (page * dim * size + offset) * kBytes;
    float* key_scale = cache.key_scales + page * size + offset;
    float* value_scale = cache.value_scales + page * size + offset;
    const bool finite = dim == 0 || write_head<Form>(k, dim, key_stride, key, key_scale);
    if (value_dim > 0 ? write_head<Form>(v, value_dim, 1, value, value_scale) : finite) continue;
    const float lost = __builtin_nanf("");
    if (dim == 0) {
      write_head<Form>(&lost, 1, 1, value, value_scale);
      continue;
    }
    write_head<Form>(&lost, 1, key_stride, key, key_scale);
    if (value_dim == 0) continue;
    __builtin_memset(value, 0, (size_t)(value_dim * kBytes));
    if constexpr (Form == KVFormat::int8) *value_scale = 0;
  }
}

}  // namespace

void write_kv(const KVLayer& cache, int64_t block, int64_t offset, const float* k, const float* v) {
  switch (cache.format) {
    case KVFormat::f32:
      return write_token<KVFormat::f32>(cache, block, offset, k, v);
    case KVFormat::f16:
      return write_token<KVFormat::f16>(cache, block, offset, k, v);
    case KVFormat::bf16:
      return write_token<KVFormat::bf16>(cache, block, offset, k, v);
    case KVFormat::int8:
      return write_token<KVFormat::int8>(cache, block, offset, k, v);
  }
}

}  // namespace quire::QUIRE_ISA

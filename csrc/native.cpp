#include "native.h"

namespace quire {

nb::ndarray<nb::numpy, float, nb::ndim<2>> Native::run(
    Ints token_ids, Ints positions, Ints row_offsets, const std::vector<Table>& tables, Ints slots,
    Ints variants, Ints logit_rows, const Snapshots& restored, const Snapshots& saved, int64_t output,
    int64_t width, const Adapters& adapters, const std::optional<Ints>& visible_ends) {
  std::vector<const int64_t*> rows;
  for (const auto& cache : caches_)
    if ((size_t)cache->group() >= tables.size())
      throw nb::value_error("expected a block table per cache group");
  for (const Table& table : tables)
    for (size_t row = 0; row < slots.size(); ++row) rows.push_back(table.data() + row * table.shape(1));
  const std::vector<Snapshot> before = snapshots(restored), after = snapshots(saved);
  std::vector<const Adapter*> by_row(slots.size());
  for (size_t row = 0; row < std::min(by_row.size(), adapters.size()); ++row)
    by_row[row] = adapters[row] ? adapters[row]->get() : nullptr;
  Batch batch{(int64_t)token_ids.size(),
              (int64_t)slots.size(),
              (int64_t)logit_rows.size(),
              token_ids.data(),
              positions.data(),
              row_offsets.data(),
              rows.data(),
              slots.data(),
              variants.data(),
              logit_rows.data(),
              before,
              after,
              by_row.data()};
  if (visible_ends) batch.visible_ends = visible_ends->data();
  float* logits;
  {
    nb::gil_scoped_release unlocked;
    logits = executor_.run(batch, output);
  }
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(logits, {logit_rows.size(), (size_t)width}, nb::handle());
}

}  // namespace quire

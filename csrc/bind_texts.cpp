// Bindings of the indices of texts.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "bindings.h"
#include "core/text_index.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

static void append(TextIndex& text, const nb::sequence& token_ids) {
  text.reserve((int64_t)nb::len(token_ids));
  for (const nb::handle token_id : token_ids) text.append(nb::cast<int32_t>(token_id));
}

static nb::tuple continued(const TextIndex& text, const Match& match, int64_t most_tokens) {
  std::array<int32_t, kLongestMatch> token_ids;
  const int64_t most = std::min<int64_t>(most_tokens, (int64_t)token_ids.size());
  const int64_t count = match.length ? text.copy(match.position, most, token_ids.data()) : 0;
  nb::tuple copied = nb::steal<nb::tuple>(PyTuple_New(count));
  for (int64_t i = 0; i < count; ++i) PyTuple_SetItem(copied.ptr(), i, PyLong_FromLong(token_ids[(size_t)i]));
  return copied;
}

// Each row is a text, and None or another text. Its ending's longest match comes as its length and the tokens
// after it, 0 and none if there is none; then a longer one in the other text in the same way.
static nb::list continuations(const nb::list& rows, int64_t most_tokens, int64_t most_places) {
  nb::list found;
  for (const nb::handle row : rows) {
    const TextIndex* text = nb::cast<const TextIndex*>(row[0]);
    const TextIndex* other = nb::cast<const TextIndex*>(row[1]);
    const Ending ending = text->ending();
    const Match own = text->longest(ending, 0, most_places);
    const Match longer = other ? other->longest(ending, own.length, most_places) : Match();
    found.append(nb::make_tuple(own.length, continued(*text, own, most_tokens), longer.length,
                                continued(other ? *other : *text, longer, most_tokens)));
  }
  return found;
}

}  // namespace quire

void bind_texts(nb::module_& m) {
  using namespace quire;
  m.attr("BOUNDARY") = kBoundary;
  m.attr("LONGEST_MATCH") = kLongestMatch;
  nb::class_<TextIndex>(m, "TextIndex", "A text in which the longest repetition of an ending is found.")
      .def(nb::init<std::shared_ptr<const TextIndex>, int64_t>(), "before"_a = nb::none(), "capacity"_a = 0)
      .def("append", &append, "token_ids"_a)
      .def("append_text", &TextIndex::append_text, "other"_a,
           "Append another text, without the one before it, and a boundary.")
      .def("__len__", [](const TextIndex& text) { return text.size(); })
      .def_prop_ro("nbytes", &TextIndex::nbytes);
  m.def("continuations", &continuations, "rows"_a, "most_tokens"_a, "most_places"_a,
        "Rows (text, another or None) -> what follows the longest match of its ending in each of the two.");
}

// Drafts by looking up a sequence's last tokens in what comes before them: quire/worker/drafts.py has the rule.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Where the longest earlier copy of the last tokens ends, of several equally long ones the latest; 0: there is none of
// `least` tokens. tokens: [length].
int64_t find_copy(const int32_t* tokens, int64_t length, int64_t least, int64_t most) {
  if (most > length - 1) most = length - 1;
  const int32_t last = tokens[length - 1];
  int64_t found = 0, longest = least - 1;
  for (int64_t end = length - 1; end > longest; --end) {
    if (tokens[end - 1] != last) continue;
    int64_t count = 1;
    while (count < most && count < end && tokens[end - 1 - count] == tokens[length - 1 - count]) ++count;
    if (count <= longest) continue;
    found = end;
    longest = count;
    if (count == most) break;
  }
  return found;
}

// Fills drafts[rows[i]] and counts[rows[i]]; returns the number of rows with drafts.
int64_t find_drafts(const Tokens& table, const Integers& rows, const Integers& lengths, int64_t least, int64_t most,
                    const Tokens& drafts, const Counts& counts) {
  const auto num_rows = static_cast<int64_t>(table.shape(0)), capacity = static_cast<int64_t>(table.shape(1));
  const auto width = static_cast<int64_t>(drafts.shape(1));
  if (rows.size() != lengths.size() || static_cast<int64_t>(drafts.shape(0)) != num_rows ||
      static_cast<int64_t>(counts.size()) != num_rows || least < 1 || most < least)
    throw std::invalid_argument("a length for each row, and drafts of each request slot expected");
  int64_t total = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = rows.data()[i], length = lengths.data()[i];
    if (row < 0 || row >= num_rows || length < 1 || length > capacity)
      throw std::invalid_argument("tokens outside the token table");
    const int32_t* tokens = table.data() + row * capacity;
    int32_t* out = drafts.data() + row * width;
    const int64_t start = find_copy(tokens, length, least, most);
    counts.data()[row] = start > 0 ? width : 0;
    total += start > 0;
    // What follows the copy; behind the end of the sequence that is the drafts themselves.
    for (int64_t k = 0; start > 0 && k < width; ++k)
      out[k] = start + k < length ? tokens[start + k] : out[start + k - length];
  }
  return total;
}

}  // namespace

void bind_drafts(nb::module_& module) {
  module.def("find_drafts", &find_drafts, "table"_a, "rows"_a, "lengths"_a, "least"_a, "most"_a, "drafts"_a, "counts"_a,
             nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire

// The suffix index as a Python module.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "suffixes.h"

namespace nb = nanobind;
using nb::arg;

typedef nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> Tokens;
typedef nb::ndarray<const double, nb::shape<AGREEMENTS * LENGTHS>, nb::c_contig, nb::device::cpu> Table;
typedef std::vector<int32_t> Short;

static nb::tuple said(const Continuation& found) {
  nb::list tokens, bins;
  for (int i = 0; i < found.count; i++) {
    tokens.append(found.tokens[i]);
    bins.append(found.bins[i]);
  }
  return nb::make_tuple(tokens, bins);
}

// With the probability that all tokens up to each are accepted.
static nb::tuple expected(const Continuation& found, const double* table) {
  nb::list tokens, bins, reach;
  double sure = 1.0;
  for (int i = 0; i < found.count; i++) {
    sure *= table[found.bins[i]];
    if (sure < LEAST_REACH) break;
    tokens.append(found.tokens[i]);
    bins.append(found.bins[i]);
    reach.append(sure);
  }
  return nb::make_tuple(tokens, bins, reach);
}

NB_MODULE(suffixes, m) {
  // A process ends without looking for cycles once more (cli/allocation.py): what they hold is no leak.
  nb::set_leak_warnings(false);
  m.attr("sources") = ADAPTIVE_SOURCES;
  nb::class_<Suffixes>(m, "Suffixes")
      .def(nb::init<int64_t, int64_t>(), arg("most") = 0, arg("largest") = LARGEST)
      .def("begin", &Suffixes::begin, arg("id"))
      .def("append", [](Suffixes& self, const Short& tokens) { self.append(tokens.data(), int64_t(tokens.size())); },
           arg("tokens"))
      .def("add", [](Suffixes& self, int64_t id, Tokens tokens) {
        nb::gil_scoped_release unlocked;
        self.add(id, tokens.data(), int64_t(tokens.size()));
      }, arg("id"), arg("tokens"))
      .def("take_back", &Suffixes::take_back, arg("count"))
      .def("remove", [](Suffixes& self, std::vector<int64_t> ids) {
        std::sort(ids.begin(), ids.end());
        nb::gil_scoped_release unlocked;
        return self.remove(ids.data(), int64_t(ids.size()));
      }, arg("ids"))
      .def("follow", [](Suffixes& self, const Short& context, bool grows) {
        return said(self.follow(context.data(), context.data() + context.size(), grows));
      }, arg("context"), arg("grows") = false)
      .def("follow_end", [](Suffixes& self, Suffixes& of, Table table) {
        return expected(self.follow_end(of), table.data());
      }, arg("of"), arg("table"))
      .def("__len__", &Suffixes::length)
      .def_prop_ro("nbytes", &Suffixes::nbytes);
}

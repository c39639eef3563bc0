// The suffix index as a Python module.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "suffixes.h"

namespace nb = nanobind;
using nb::arg;

typedef nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> Tokens;
typedef nb::ndarray<const double, nb::shape<AGREEMENTS * LENGTHS>, nb::c_contig, nb::device::cpu> Table;
typedef nb::ndarray<double, nb::shape<AGREEMENTS * LENGTHS>, nb::c_contig, nb::device::cpu> Counts;
typedef nb::ndarray<double, nb::shape<2 + AGREEMENTS>, nb::c_contig, nb::device::cpu> Tally;
typedef std::vector<int32_t> Short;

static nb::tuple said(const Continuation& found) {
  nb::list tokens, bins;
  for (int i = 0; i < found.count; i++) {
    tokens.append(found.tokens[i]);
    bins.append(found.bins[i]);
  }
  return nb::make_tuple(tokens, bins);
}

// A continuation with, for each token, the probability that all tokens up to it are accepted. `promised` is their sum.
struct Expected {
  Continuation found;
  double reach[AHEAD], promised = 0.0;

  Expected() = default;

  Expected(const Continuation& continuation, const double* table) : found(continuation) {
    double sure = 1.0;
    for (int i = 0; i < found.count; i++) {
      sure *= table[found.bins[i]];
      if (sure < LEAST_REACH) {
        found.count = i;
        break;
      }
      reach[i] = sure;
      promised += sure;
    }
  }

  nb::tuple said() const {
    nb::list probabilities;
    for (int i = 0; i < found.count; i++) probabilities.append(reach[i]);
    nb::tuple both = ::said(found);
    return nb::make_tuple(both[0], both[1], probabilities);
  }
};

// Finds the best continuation of the running text in several indexes, in one call (`Follower` in drafting/suffixes.py).
class Follower {
 public:
  Follower(nb::handle text, nb::list sources) : owner(nb::borrow(text)), text(nb::cast<Suffixes*>(text)) {
    for (nb::handle source : sources) {
      indexes.push_back(nb::cast<Suffixes*>(source[0]));
      tables.push_back(nb::cast<Table>(source[1]));
      owned.push_back(nb::borrow(source[0]));
    }
  }

  // Appends `tokens` to the text. Returns the number of the source with the best continuation (-1 if there is none),
  // and that continuation.
  nb::tuple look(const Short& tokens) {
    text->append(tokens.data(), int64_t(tokens.size()));
    Expected best;
    int from = -1;
    for (size_t i = 0; i < indexes.size(); i++) {
      const Expected found(indexes[i]->follow_end(*text), tables[i].data());
      if (found.promised > best.promised) best = found, from = int(i);
    }
    return nb::make_tuple(from, best.said());
  }

 private:
  nb::object owner;
  Suffixes* text;
  std::vector<nb::object> owned;
  std::vector<Suffixes*> indexes;
  std::vector<Table> tables;
};

// Counts found tokens by bin, as `Bins.observe` (control/matches.py) does, in that class's arrays.
class Counter {
 public:
  Counter(Counts accepted, Counts rejected, Tally tally, Table usual, double keep)
      : accepted(accepted), rejected(rejected), tally(tally), usual(usual), keep(keep) {}

  // Counts tokens up to and including the first one that differs from what was said.
  void observe(const Short& tokens, const Short& bins, const Short& said) {
    double *a = accepted.data(), *r = rejected.data(), *t = tally.data();
    bool hit = true;
    for (size_t place = 0; hit && place < tokens.size() && place < said.size(); place++) {
      const int b = bins[place];
      const double before = a[b], others = r[b];
      hit = tokens[place] == said[place];
      a[b] = before * keep + (hit ? 1.0 : 0.0);
      r[b] = others * keep + (hit ? 0.0 : 1.0);
      t[0] += a[b] - before;
      t[1] += usual.data()[b] * (a[b] + r[b] - before - others);
      t[2 + b / LENGTHS] = 1.0;
    }
  }

 private:
  Counts accepted, rejected;
  Tally tally;
  Table usual;
  const double keep;
};

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
        return Expected(self.follow_end(of), table.data()).said();
      }, arg("of"), arg("table"))
      .def("__len__", &Suffixes::length)
      .def_prop_ro("nbytes", &Suffixes::nbytes);
  nb::class_<Follower>(m, "Follower")
      .def(nb::init<nb::handle, nb::list>(), arg("text"), arg("sources"))
      .def("look", &Follower::look, arg("tokens"));
  nb::class_<Counter>(m, "Counter")
      .def(nb::init<Counts, Counts, Tally, Table, double>(), arg("accepted"), arg("rejected"), arg("tally"), arg("usual"),
           arg("keep"))
      .def("observe", &Counter::observe, arg("tokens"), arg("bins"), arg("said"));
}

// The kernels as a Python module named ADAPTIVE_MODULE, one for each instruction set. This file declares the whole
// interface to Python, directly on the structures that the kernels read. Memory is passed as an address (an integer).
// The caller's tensors and arrays must outlive the call, or the object that was made with their addresses.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "draft.h"
#include "verify.h"

namespace {

namespace nb = nanobind;
using nb::arg;

typedef uintptr_t Address;
typedef std::vector<int64_t> Tokens;
typedef std::vector<double> Numbers;
typedef nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu> Doubles;
typedef nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> Whole32;

template <class T>
T* to(Address address) {
  return reinterpret_cast<T*>(address);
}

// Releases the GIL during the call. Not used for functions that access objects or memory that other Python threads may
// change.
typedef nb::call_guard<nb::gil_scoped_release> Unlocked;

// Whether the system lets this process use all of the instructions. Linux requires a request before the first use of
// tiles.
bool usable() {
#if defined(__AMX_BF16__)
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // Linux's numbers for arch_prctl
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return true;
#endif
}

void check(bool done) {
  if (!done) throw nb::index_error("a token is not of the model's vocabulary");
}

// Thresholds over the caller's arrays, to which they keep references.
struct Thresholds {
  Doubles edges, accepted, follow, drop_below, last_below, reach;
  Whole32 bins, asked, drafts;
  Stopping stopping;

  Thresholds(Doubles edges, Doubles accepted, Doubles follow, Doubles drop_below, Doubles last_below, Doubles reach,
             Whole32 bins, Whole32 asked, Whole32 drafts)
      : edges(edges), accepted(accepted), follow(follow), drop_below(drop_below), last_below(last_below), reach(reach),
        bins(bins), asked(asked), drafts(drafts) {
    const auto longest = drop_below.size();
    if (accepted.size() != edges.size() + 1 || follow.size() != accepted.size() || last_below.size() != longest ||
        asked.size() == 0 || bins.size() != asked.size() * longest || reach.size() != 1 || drafts.size() != 1)
      throw nb::value_error("thresholds of lengths that do not belong together");
    stopping = {edges.data(), accepted.data(), follow.data(), drop_below.data(), last_below.data(), bins.data(), asked.data(),
                drafts.data(), reach.data(), int32_t(edges.size()), int32_t(longest), int32_t(asked.size())};
  }
};

// Python callables that a proposal calls. An exception of theirs, also from ctrl-C, ends the draft and is raised after
// it.
struct Asked {
  nb::handle adviser, masker;
  std::exception_ptr error;

  static int advice(void* self, int position, float confidence) {
    Asked& asked = *(Asked*)self;
    nb::gil_scoped_acquire lock;
    try {
      return nb::cast<int>(asked.adviser(position, confidence));
    } catch (...) {
      asked.error = std::current_exception();
      return DROP;
    }
  }

  static bool mask(void* self, const int64_t* drafted, int count, const uint32_t** allowed) {
    Asked& asked = *(Asked*)self;
    nb::gil_scoped_acquire lock;
    try {
      *allowed = to<uint32_t>(nb::cast<Address>(asked.masker(Tokens(drafted, drafted + count))));
      return true;
    } catch (...) {
      asked.error = std::current_exception();
      return false;
    }
  }
};

Recall asked_for(const Recall* recall) { return recall ? *recall : Recall{}; }

// A requested proposal and its result.
struct Wanted {
  const Sampling& sampling;
  Tokens tokens, drafted;
  Numbers uniform;
  Asked asked;
  Drafting drafting;

  Wanted(const Sampling& sampling, Tokens given, int length, int64_t known, Numbers numbers, Address probs,
         const Thresholds* thresholds, nb::object adviser, nb::object masker, Address cos_sin, Address caches, int64_t capacity,
         int start, Address kept, Address given_features, int feature_count, const Recall* recall)
      : sampling(sampling), tokens(std::move(given)), drafted(length), uniform(std::move(numbers)),
        asked{adviser, masker, nullptr} {
    if (tokens.empty()) throw nb::value_error("a pass needs a token");
    if (!sampling.greedy && !sampling.seeded && (int(uniform.size()) < length || !probs))
      throw nb::value_error("a proposal that is drawn needs random numbers and a place for its distributions");
    const Adviser who{thresholds ? &thresholds->stopping : nullptr, adviser.is_none() ? nullptr : Asked::advice, &asked};
    const Masker mask{masker.is_none() ? nullptr : Asked::mask, &asked};
    const Text text{int(tokens.size()), 1, to<float>(cos_sin), to<void*>(caches), capacity, start,
                    {to<float>(kept), to<float>(given_features), feature_count}, nullptr, asked_for(recall)};
    drafting = {{&sampling, who, mask, length, known, uniform.data(), to<float>(probs)}, text, tokens.data(), drafted.data(), 0, 0};
  }
  Wanted(const Wanted&) = delete;

  nb::tuple found() {
    drafted.resize(drafting.found);
    return nb::make_tuple(drafted, drafting.passed);
  }
};

// Makes proposals without the GIL. Throws IndexError for a token outside the vocabulary.
void make(const Decoder& decoder, Drafting* all, int count, int threads) {
  bool done;
  {
    nb::gil_scoped_release unlocked;
    done = draft(decoder, all, count, threads);
  }
  check(done);
}

nb::tuple propose(const Decoder& decoder, const Sampling& sampling, Tokens tokens, int length, int64_t known, Numbers uniform,
                  Address probs, const Thresholds* thresholds, nb::object adviser, nb::object masker, Address cos_sin, Address caches,
                  int64_t capacity, int start, Address kept, Address given, int feature_count, const Recall* recall, int threads) {
  Wanted wanted(sampling, std::move(tokens), length, known, std::move(uniform), probs, thresholds, adviser, masker, cos_sin, caches,
                capacity, start, kept, given, feature_count, recall);
  make(decoder, &wanted.drafting, 1, threads);
  if (wanted.asked.error) std::rethrow_exception(wanted.asked.error);
  return wanted.found();
}

// Proposals for several texts at once.
nb::list propose_together(const Decoder& decoder, const std::vector<Wanted*>& all, int threads) {
  if (decoder.fuse.linear) throw nb::value_error("a head reads one text at a time");
  std::vector<Drafting> each;
  for (Wanted* wanted : all) each.push_back(wanted->drafting);
  make(decoder, each.data(), int(each.size()), threads);
  nb::list found;
  for (size_t i = 0; i < all.size(); i++) {
    if (all[i]->asked.error) std::rethrow_exception(all[i]->asked.error);
    all[i]->drafting = each[i];
    found.append(all[i]->found());
  }
  return found;
}

nb::tuple told(const Sampling& sampling, const Verdict& v, Numbers& chosen) {
  chosen.resize(v.extra < 0 ? 0 : v.accepted + 1);
  nb::object probabilities = sampling.greedy ? nb::none() : nb::cast(chosen);
  return nb::make_tuple(v.accepted, v.extra, v.used, probabilities);
}

// The allowed tokens of each row of a verification of `count` tokens, as in Evidence.
std::vector<const uint32_t*> by_row(const std::vector<Address>& allowed, int count) {
  if (!allowed.empty() && int(allowed.size()) != count + 1) throw nb::value_error("a mask for other rows than there are");
  std::vector<const uint32_t*> rows;
  for (const Address place : allowed) rows.push_back(to<uint32_t>(place));
  return rows;
}

nb::tuple judged(const Sampling& sampling, Address logits, int64_t vocab, const Tokens& drafted, int64_t position, Address q,
                 int64_t fewer, const Numbers& uniform, const std::vector<Address>& allowed) {
  const int count = int(drafted.size());
  const auto masks = by_row(allowed, count);
  for (const int64_t token : drafted) check(token >= 0 && token < vocab);
  if (!sampling.greedy && !sampling.seeded && int(uniform.size()) < count + 2)
    throw nb::value_error("the rule needs two random numbers more than there are drafted tokens");
  Numbers chosen(count + 1);
  Verdict v;
  {
    nb::gil_scoped_release unlocked;
    v = judge(sampling, to<float>(logits), vocab, drafted.data(), count, position,
              {to<float>(q), fewer, uniform.data(), masks.empty() ? nullptr : masks.data()}, chosen.data());
  }
  return told(sampling, v, chosen);
}

// A pass over tokens, the last `count` of them drafted, and then the acceptance rule on its logits (count + 1, vocab).
nb::tuple verified(const Decoder& decoder, const Sampling& sampling, const Tokens& tokens, int count, Address q, int64_t fewer,
                   const Numbers& uniform, const std::vector<Address>& allowed, Address cos_sin, Address caches, int64_t capacity,
                   int start, Address kept, Address logits, const Recall* recall, int threads) {
  const int size = int(tokens.size());
  if (count < 0 || count >= size) throw nb::value_error("a verification needs a token before those drafted");
  if (!sampling.greedy && !sampling.seeded && int(uniform.size()) < count + 2)
    throw nb::value_error("the rule needs two random numbers more than there are drafted tokens");
  const auto masks = by_row(allowed, count);
  Numbers chosen(count + 1);
  Verdict v;
  bool done;
  {
    nb::gil_scoped_release unlocked;
    const Text text{size, count + 1, to<float>(cos_sin), to<void*>(caches), capacity, start, {to<float>(kept)}, nullptr,
                    asked_for(recall)};
    done = decode(decoder, tokens.data(), &text, 1, to<float>(logits), threads);
    if (done)
      v = judge(sampling, to<float>(logits), decoder.head->out, tokens.data() + size - count, count, start + size - count,
                {to<float>(q), fewer, uniform.data(), masks.empty() ? nullptr : masks.data()}, chosen.data());
  }
  check(done);
  return told(sampling, v, chosen);
}

// A pass over several texts; `tokens` are those of each text in turn.
void together(const Decoder& decoder, const Tokens& tokens, const std::vector<Text>& texts, Address logits, int threads) {
  size_t count = 0;
  for (const Text& text : texts) {
    if (text.count < 1 || text.rows < 0 || text.rows > text.count) throw nb::value_error("a text without tokens, or with too few");
    count += text.count;
  }
  if (texts.empty() || count != tokens.size()) throw nb::value_error("tokens that are not those of the texts");
  if (decoder.fuse.linear) throw nb::value_error("a head reads one text at a time");
  bool done;
  {
    nb::gil_scoped_release unlocked;
    done = decode(decoder, tokens.data(), texts.data(), int(texts.size()), to<float>(logits), threads);
  }
  check(done);
}

void bind(nb::module_& m) {
  nb::set_leak_warnings(false);  // objects in Python caches at the program's end are no leaks
  m.attr("sources") = ADAPTIVE_SOURCES;
  m.attr("panel") = PANEL;
  m.attr("chunk") = TOKENS;
  m.def("filled_to", &filled_to, arg("bytes"));
  m.attr("usable") = usable();
  m.def("attends", &attends, arg("size"));
  m.def("recurs", &recurs, arg("key_size"), arg("value_size"));
  m.def("pack", [](Address weight, Address out, int64_t rows, int64_t words, int threads) {
    pack(to<uint32_t>(weight), to<uint32_t>(out), rows, words, threads);
  }, Unlocked());
  m.def("probabilities", [](const Sampling& sampling, Address logits, Address out, int rows, int64_t count) {
    probabilities(sampling.cuts, to<float>(logits), to<float>(out), rows, count);
  }, Unlocked());
  m.def("likeliest_of", [](Address logits, int rows, int64_t count, int kept, Address ids, Address logprobs, Address rest) {
    likeliest_of(to<float>(logits), rows, count, kept, to<int32_t>(ids), to<float>(logprobs), to<float>(rest));
  });
  m.def("draw", [](Address p, Address less, int64_t count, int64_t fewer, double uniform) {
    return draw(to<float>(p), to<float>(less), count, fewer, uniform);
  });
  m.def("race", [](Address p, int64_t count, uint64_t seed, int64_t position) {
    return race(to<float>(p), count, keys_of(seed, position));
  });
  m.def("judge", &judged, arg("sampling"), arg("logits"), arg("vocab"), arg("drafted"), arg("position"), arg("q"), arg("fewer"),
        arg("uniform"), arg("allowed"));

  nb::class_<Sampling>(m, "Sampling")
      .def("__init__", [](Sampling* self, float factor, float top_p, float min_p, int32_t top_k, bool greedy,
                          std::optional<uint64_t> seed) {
        new (self) Sampling{{factor, top_p, min_p, top_k}, greedy, seed.has_value(), seed.value_or(0)};
      }, arg("factor"), arg("top_p"), arg("min_p"), arg("top_k"), arg("greedy"), arg("seed") = nb::none());

  nb::class_<Linear>(m, "Linear")
      .def("__init__", [](Linear* self, Address weight, Address bias, Address scales, Address sums, int inputs, int outputs,
                          int dtype, float factor) {
        new (self) Linear{to<void>(weight), to<float>(bias), to<float>(scales), to<int32_t>(sums), inputs, outputs, dtype,
                          factor};
      })
      .def("__call__", [](const Linear& self, Address x, Address y, int rows, bool add, int threads, int prologue, Address norm,
                          float eps) {
        apply(&self, to<float>(x), to<float>(y), rows, add, threads, prologue, to<float>(norm), eps);
      }, Unlocked());

  nb::class_<Tree>(m, "Tree")
      .def("__init__", [](Tree* self, const std::vector<int32_t>& parents) {
        std::vector<int32_t> depths;
        for (const int32_t parent : parents) {
          if (parent < -1 || parent >= int(depths.size())) throw nb::value_error("a node before the one that it follows");
          depths.push_back(parent < 0 ? 0 : depths[parent] + 1);
        }
        new (self) Tree{parents, depths};
      });

  nb::class_<Attention>(m, "Attention")
      .def("__init__", [](Attention* self, int heads, int key_heads, int size, bool half, bool gated, bool reused, int stride,
                          int key_rope, int query_rope, int window, float scale, float softcap, Address query_weight, Address sinks) {
        if (!attends(size) || key_heads < 1 || heads % key_heads) throw nb::value_error("heads that are not attended");
        new (self) Attention{heads, key_heads, size, half, gated, reused, stride, key_rope, query_rope, window, scale, softcap,
                             to<float>(query_weight), to<float>(sinks)};
      }, arg("heads"), arg("key_heads"), arg("size"), arg("half"), arg("gated"), arg("reused"), arg("stride"), arg("key_rope"),
      arg("query_rope"), arg("window"), arg("scale"), arg("softcap"), arg("query_weight"), arg("sinks"))
      .def("__call__", [](const Attention& self, Address qkv, Address cos_sin, Address cache, Address out, int64_t capacity,
                          int start, int count, const Tree* tree, int threads) {
        if (tree && int(tree->parents.size()) < count) throw nb::value_error("more tokens than nodes");
        const Pass pass{&self, to<float>(qkv), to<float>(cos_sin), to<void>(cache), to<float>(out), capacity, start, count, tree};
        attend(&pass, 1, threads);
      }, Unlocked(), arg("qkv"), arg("cos_sin"), arg("cache"), arg("out"), arg("capacity"), arg("start"), arg("count"),
      arg("tree").none(), arg("threads"));

  nb::class_<Recall>(m, "Recall")
      .def("__init__", [](Recall* self, Address memory, int start, bool ahead, int length, int rows, int settled) {
        new (self) Recall{to<float*>(memory), start, ahead, length, rows, settled};
      });

  nb::class_<DeltaNet>(m, "DeltaNet")
      .def("__init__", [](DeltaNet* self, int key_heads, int value_heads, int key_size, int value_size, int kernel,
                          Address convolution, Address rate, Address bias, Address norm, float eps) {
        new (self) DeltaNet{key_heads, value_heads, key_size, value_size, kernel, to<float>(convolution), to<float>(rate),
                            to<float>(bias), to<float>(norm), eps};
      })
      .def("__call__", [](const DeltaNet& self, Address projected, Address out, int layer, int count, const Recall& recall,
                          int threads) {
        const Scan scan{&self, to<float>(projected), to<float>(out), layer, count, &recall};
        recur(&scan, 1, threads);
      }, Unlocked());

  nb::class_<Norm>(m, "Norm")
      .def("__init__", [](Norm* self, Address weight, float eps, int width) {
        new (self) Norm{to<float>(weight), eps, width};
      }, arg("weight") = 0, arg("eps") = 0.0f, arg("width") = 0);

  nb::class_<Mixture>(m, "Mixture")
      .def("__init__", [](Mixture* self, const Linear& router, std::vector<const Linear*> up, std::vector<const Linear*> down,
                          int top_k, bool sigmoid, bool normalised, bool shared, float factor, Address bias, int gate,
                          Address limits, Norm router_norm, Address scales) {
        const int count = int(up.size()) - shared;
        if (up.size() != down.size() || top_k < 1 || count < top_k || router.out < count || router.out > count + shared)
          throw nb::value_error("experts that their router does not choose among");
        new (self) Mixture{&router, std::move(up), std::move(down), top_k, sigmoid, normalised, shared, factor,
                           to<float>(bias), gate, to<float>(limits), router_norm, to<float>(scales)};
      }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), arg("router"), arg("up"), arg("down"),
      arg("top_k"), arg("sigmoid"), arg("normalised"), arg("shared"), arg("factor"), arg("bias"), arg("gate"), arg("limits"),
      arg("router_norm"), arg("scales"));

  nb::class_<Beside>(m, "Beside")
      .def("__init__", [](Beside* self, Norm before, Norm after, Norm after_dense) {
        new (self) Beside{before, after, after_dense};
      }, arg("before") = Norm{}, arg("after") = Norm{}, arg("after_dense") = Norm{});

  nb::class_<LayerInput>(m, "LayerInput")
      .def("__init__", [](LayerInput* self, const Linear* gate, const Linear* projection, Norm norm) {
        new (self) LayerInput{gate, projection, norm};
      }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), arg("gate").none() = nullptr, arg("projection").none() = nullptr,
      arg("norm") = Norm{});

  nb::class_<Layer>(m, "Layer")
      .def("__init__", [](Layer* self, const Linear& qkv, const Linear& output, const Linear* up, const Linear* down,
                          const Mixture* mixture, const Attention* attention, const DeltaNet* delta, int cache,
                          Norm attention_norm, Norm mlp_norm, Norm query_norm, Norm key_norm, Norm value_norm,
                          Norm after_attention, Norm after_mlp, Beside beside, LayerInput input, float factor) {
        const bool both = mixture && up;
        if (!up != !down || (!mixture && !up)) throw nb::value_error("a layer has a feed-forward part, a mixture, or both");
        if (both ? !beside.before.weight || !beside.after.weight || !beside.after_dense.weight || !after_mlp.weight
                 : mixture && (after_mlp.weight || !mlp_norm.weight))
          throw nb::value_error("a mixture without the norms around it, or with too many");
        if (!attention == !delta) throw nb::value_error("a layer attends or has a state");
        if (attention && attention->row() != qkv.out) throw nb::value_error("a projection to other heads");
        new (self) Layer{&qkv, &output, up, down, attention_norm, mlp_norm, query_norm, key_norm, value_norm, after_attention,
                         after_mlp, attention, cache, delta, mixture, beside, input, factor};
      }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
      nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 18>(), arg("qkv"), arg("output"),
      arg("up").none(), arg("down").none(), arg("mixture").none(), arg("attention").none(), arg("delta").none(), arg("cache"),
      arg("attention_norm"), arg("mlp_norm"), arg("query_norm"), arg("key_norm"), arg("value_norm"), arg("after_attention"),
      arg("after_mlp"), arg("beside"), arg("input"), arg("factor"));

  nb::class_<Text>(m, "Text")
      .def("__init__", [](Text* self, int count, int rows, Address cos_sin, Address caches, int64_t capacity, int start,
                          Address kept, const Tree* tree, const Recall* recall) {
        if (tree && int(tree->parents.size()) < count) throw nb::value_error("more tokens than nodes");
        new (self) Text{count, rows, to<float>(cos_sin), to<void*>(caches), capacity, start, {to<float>(kept)}, tree,
                        asked_for(recall)};
      }, nb::keep_alive<1, 9>(), arg("count"), arg("rows"), arg("cos_sin"), arg("caches"), arg("capacity"), arg("start"),
      arg("kept"), arg("tree").none(), arg("recall").none());

  nb::exception<ReadError>(m, "ReadError", nb::module_::import_("adaptive.errors").attr("AdaptiveError").ptr());
  nb::class_<Section>(m, "Section")
      .def("__init__", [](Section* self, int64_t offset, int64_t bytes, Address to_) {
        new (self) Section{offset, bytes, to<char>(to_)};
      }, arg("offset") = 0, arg("bytes") = 0, arg("to") = 0);
  nb::class_<Stream>(m, "Stream")
      .def("__init__", [](Stream* self, int file, nb::bytes path, const std::vector<Section>& sections, int64_t piece,
                          int readers, nb::object) {
        new (self) Stream{file, std::string(path.c_str(), path.size()), sections, piece, readers};
      }, nb::keep_alive<1, 7>(), arg("file"), arg("path"), arg("sections"), arg("piece"), arg("readers"), arg("memory"));

  nb::class_<Embedding>(m, "Embedding")
      .def("__init__", [](Embedding* self, Address weight, int width, bool half, float factor) {
        new (self) Embedding{to<void>(weight), width, half, factor};
      }, arg("weight"), arg("width"), arg("half"), arg("factor"));

  nb::class_<PerLayerInputs>(m, "PerLayerInputs")
      .def("__init__", [](PerLayerInputs* self, const Linear& projection, Norm norm, Embedding embedding, float factor) {
        if (projection.out != embedding.width || embedding.width % norm.width)
          throw nb::value_error("inputs that are not those of some layers");
        new (self) PerLayerInputs{&projection, norm, embedding, factor};
      }, nb::keep_alive<1, 2>(), arg("projection"), arg("norm"), arg("embedding"), arg("factor"));

  nb::class_<Decoder>(m, "Decoder")
      .def("__init__", [](Decoder* self, std::vector<Layer> layers, int stride, const Linear& head, Embedding embedding,
                          Norm final_norm, int gate, int vocab, float softcap, const PerLayerInputs* inputs, const Linear* fuse,
                          Norm token_norm, Norm feature_norm, Stream* stream, Address ids, std::vector<int32_t> taps) {
        for (const Layer& layer : layers)
          if (layer.attention && layer.attention->stride != stride) throw nb::value_error("rotations of another stride");
        for (const int32_t tap : taps)
          if (tap < 0 || tap > int(layers.size())) throw nb::value_error("features before a layer that there is not");
        new (self) Decoder{std::move(layers), stride, &head, embedding, final_norm, gate, vocab, softcap,
                           inputs ? *inputs : PerLayerInputs{}, {fuse, token_norm, feature_norm}, stream, to<int64_t>(ids),
                           std::move(taps)};
      }, nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 10>(), nb::keep_alive<1, 11>(),
      nb::keep_alive<1, 14>(), arg("layers"), arg("stride"), arg("head"), arg("embedding"), arg("final_norm"), arg("gate"),
      arg("vocab"), arg("softcap"), arg("inputs").none(), arg("fuse").none(), arg("token_norm"), arg("feature_norm"),
      arg("stream").none() = nullptr, arg("ids") = 0, arg("taps") = std::vector<int32_t>())
      .def("__call__", [](const Decoder& self, const Tokens& tokens, int rows, Address cos_sin, Address caches, int64_t capacity,
                          int start, Address kept, Address given, int known, Address logits, const Recall* recall,
                          int threads, const Tree* tree) {
        if (tokens.empty()) throw nb::value_error("a pass needs a token");
        const size_t earlier = tree ? tree->parents.size() - tokens.size() : 0;
        if (tree && tree->parents.size() < tokens.size()) throw nb::value_error("more tokens than nodes");
        for (size_t node = earlier; tree && self.fuse.linear && node < tree->parents.size(); node++)
          if (tree->parents[node] >= int(earlier)) throw nb::value_error("a node that reads the feature of one of the same pass");
        bool done;
        {
          nb::gil_scoped_release unlocked;
          const Text text{int(tokens.size()), rows, to<float>(cos_sin), to<void*>(caches), capacity, start,
                          {to<float>(kept), to<float>(given), known}, tree, asked_for(recall)};
          done = decode(self, tokens.data(), &text, 1, to<float>(logits), threads);
        }
        check(done);
      }, arg("tokens"), arg("rows"), arg("cos_sin"), arg("caches"), arg("capacity"), arg("start"), arg("kept"), arg("given"),
      arg("known"), arg("logits"), arg("recall").none(), arg("threads"), arg("tree").none() = nullptr)
      .def("propose", &propose, arg("sampling"), arg("tokens"), arg("length"), arg("known"), arg("uniform"), arg("probs"),
           arg("thresholds").none(), arg("adviser").none(), arg("masker").none(), arg("cos_sin"), arg("caches"), arg("capacity"),
           arg("start"), arg("kept"), arg("given"), arg("feature_count"), arg("recall").none(), arg("threads"))
      .def("propose_together", &propose_together)
      .def("verify", &verified, arg("decoder"), arg("tokens"), arg("count"), arg("q"), arg("fewer"), arg("uniform"),
           arg("allowed"), arg("cos_sin"), arg("caches"), arg("capacity"), arg("start"), arg("kept"), arg("logits"),
           arg("recall").none(), arg("threads"))
      .def("together", &together);

  nb::class_<Wanted>(m, "Wanted")
      .def(nb::init<const Sampling&, Tokens, int, int64_t, Numbers, Address, const Thresholds*, nb::object, nb::object, Address, Address,
                    int64_t, int, Address, Address, int, const Recall*>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(), arg("sampling"),
           arg("tokens"), arg("length"), arg("known"), arg("uniform"), arg("probs"), arg("thresholds").none(),
           arg("adviser").none(), arg("masker").none(), arg("cos_sin"), arg("caches"), arg("capacity"), arg("start"), arg("kept"), arg("given"), arg("feature_count"), arg("recall").none());

  nb::class_<Thresholds>(m, "Thresholds")
      .def(nb::init<Doubles, Doubles, Doubles, Doubles, Doubles, Doubles, Whole32, Whole32, Whole32>(), arg("edges"),
           arg("accepted"), arg("follow"), arg("drop_below"), arg("last_below"), arg("reach"), arg("bins"), arg("asked"),
           arg("drafts"));
}

}  // namespace

NB_MODULE(ADAPTIVE_MODULE, m) { bind(m); }

// A whole pass of a decoder in one call, so that nothing else runs between two layers. Its parts: RMS norms, rotary
// attention or gated delta nets, feed-forward parts or mixtures of experts. FAMILIES of families.py lists the models.

#pragma once

#include "attention.h"
#include "delta.h"
#include "mixture.h"
#include "stream.h"

namespace {

// The use of a layer's own input, which it reads beside the residual stream: the layer adds
// norm(projection(prologue([gate(x), input]))), or nothing if `gate` is null.
struct LayerInput {
  const Linear *gate, *projection;
  Norm norm;
};

// One layer. `query_norm`, `key_norm` and `value_norm` are over each head, or over all queries and all keys of a token.
// The `after` norms apply to what a part adds to the residual stream. `attention` attends over the text's cache number
// `cache`. With a delta net it is null, and `qkv` is the net's projection. With a mixture `up` and `down` are null, or
// the results of both are added; `beside` then has the norms around them. `factor` multiplies the residual stream at
// the end of the layer.
struct Layer {
  const Linear *qkv, *output, *up, *down;
  Norm attention_norm, mlp_norm, query_norm, key_norm, value_norm, after_attention, after_mlp;
  const Attention* attention;
  int32_t cache;
  const DeltaNet* delta;
  const Mixture* mixture;
  Beside beside;
  LayerInput input;
  float factor;

  bool writes() const { return delta || !attention->reused; }
};

// The input of a head: linear([token_norm(embedding of a token), feature_norm(feature of the token before it)]).
// `linear` is null for a model that is no head.
struct Fuse {
  const Linear* linear;
  Norm token_norm, feature_norm;
};

// Hidden states by position: (length, width) behind the last layer and before the final norm, or (length, taps * width)
// before the layers `Decoder::taps`, side by side. A pass writes those of its tokens into `kept` unless it is null. A head
// reads those of the first `known` tokens from `given`, others from `kept`.
struct Features {
  float* kept = nullptr;
  const float* given = nullptr;
  int known = 0;
};

// The tokens that a pass appends to one text: `count` tokens behind `start` others; logits are wanted of the last
// `rows`. `cos_sin` by position (stride,), each of the `caches` (2, key heads, capacity, size), and `tree` as in
// attention.h. `recall` as in delta.h, for models with delta nets, which take no trees.
struct Text {
  int count, rows;
  const float* cos_sin;
  void* const* caches;
  int64_t capacity;
  int start;
  Features features;
  const Tree* tree = nullptr;
  Recall recall = {};

  // Where the first new token lies in the cache.
  int place() const { return tree ? start + int(tree->parents.size()) - count : start; }
};

// An embedding with rows (width,), float32 or bfloat16 (`half`), times a factor.
struct Embedding {
  const void* weight;
  int32_t width;
  bool half;
  float factor;
};

// The layers' own inputs of a token, (layers, norm.width): (norm(projection(its embedding)) + its row of `embedding`) *
// factor. `projection` is null for a model without them.
struct PerLayerInputs {
  const Linear* projection;
  Norm norm;
  Embedding embedding;
  float factor;
};

struct Decoder {
  std::vector<Layer> layers;
  int32_t stride;  // of rotations, as in attention.h
  const Linear* head;
  Embedding embedding;
  Norm final_norm;
  int32_t gate;  // Prologue of the layers' `down`
  int32_t vocab;
  float softcap;  // bounds the logits to plus and minus this (0: no bound)
  PerLayerInputs inputs;
  Fuse fuse;
  Stream* stream;  // reads the weights of some layers; or null
  const int64_t* ids;  // (head->out,), the tokens of the logits, increasing; null for the whole vocabulary
  // The layers before which features are kept, their number standing for behind the last; empty: behind the last.
  std::vector<int32_t> taps;

  // The number of layers up to the last one that writes a cache or state for later tokens.
  int writing() const {
    int count = int(layers.size());
    while (count && !layers[count - 1].writes()) count--;
    return count;
  }
};

// Writes a row (width,) of an embedding. bfloat16 numbers times a factor are rounded to bfloat16, as in transformers.
inline void embed(const Embedding& e, int64_t token, float* x) {
  const size_t place = size_t(token) * e.width;
  for (int k = 0; k < e.width; k++) {
    if (!e.half) {
      x[k] = ((const float*)e.weight)[place + k] * e.factor;
      continue;
    }
    x[k] = widened(((const uint16_t*)e.weight)[place + k]) * e.factor;
    if (e.factor != 1) x[k] = widened(rounded(x[k]));
  }
}

// Normalises x (count,) in place, norm.width numbers at a time.
void normalise_each(float* x, int count, const Norm& norm) {
  for (const float* end = x + count; x < end; x += norm.width) {
    const float factor = rms_factor(x, norm.width, norm.eps);
    for (int k = 0; k < norm.width; k++) x[k] *= factor * norm.weight[k];
  }
}

// Computes a head's input x (n, width) for the tokens (n,) of a text. The first token of a text has no token before it
// and reads a feature of zeros. Of the n tokens only the first may read from `kept`; the features for the others are
// known. A node of a tree reads that of its parent, which is no node of this pass.
void fuse(const Decoder& d, const int64_t* tokens, const Text& text, float* x, int threads) {
  const int width = d.head->in, n = text.count;
  const Features& features = text.features;
  float* both = scratch<float, 17>(size_t(n) * 2 * width);
  for (int i = 0; i < n; i++) {
    float* row = both + size_t(i) * 2 * width;
    embed(d.embedding, tokens[i], row);
    normalise(row, d.fuse.token_norm, row);
    const int before = text.start + (text.tree ? text.tree->parents[text.tree->parents.size() - n + i] : i - 1);
    if (before < 0)
      std::memset(row + width, 0, width * sizeof(float));
    else
      normalise((before < features.known ? features.given : features.kept) + size_t(before) * width, d.fuse.feature_norm,
                row + width);
  }
  apply(d.fuse.linear, both, x, n, 0, threads, NONE, nullptr, 0);
}

// Applies a linear layer to x, after the norm if there is one.
void apply_normed(const Linear* p, const float* x, float* y, int n, int threads, const Norm& norm) {
  apply(p, x, y, n, 0, threads, norm.weight ? RMS_NORM : NONE, norm.weight, norm.eps);
}

// Normalises y (n, norm.width) and adds it to x.
void add_normed(const float* y, const Norm& norm, float* x, int n) {
  for (int i = 0; i < n; i++) {
    float* sum = x + size_t(i) * norm.width;
    const float* term = y + size_t(i) * norm.width;
    const float factor = rms_factor(term, norm.width, norm.eps);
    for (int k = 0; k < norm.width; k++) sum[k] += term[k] * factor * norm.weight[k];
  }
}

// Adds a linear layer's result to x, after the norm if there is one.
void add(const Linear* p, const float* from, float* x, int n, int threads, int prologue, const Norm& norm) {
  if (!norm.weight) return apply(p, from, x, n, 1, threads, prologue, nullptr, 0);
  float* y = scratch<float, 15>(size_t(n) * p->out);
  apply(p, from, y, n, 0, threads, prologue, nullptr, 0);
  add_normed(y, norm, x, n);
}

// Computes the layers' inputs (n, layers * size) of tokens (n,) with embeddings x.
void per_layer_inputs(const PerLayerInputs& p, const int64_t* tokens, const float* x, float* inputs, int n, int threads) {
  const int width = p.embedding.width;
  float* own = scratch<float, 31>(width);
  apply(p.projection, x, inputs, n, 0, threads, NONE, nullptr, 0);
  for (int i = 0; i < n; i++) {
    float* row = inputs + size_t(i) * width;
    normalise_each(row, width, p.norm);
    embed(p.embedding, tokens[i], own);
    for (int k = 0; k < width; k++) row[k] = (row[k] + own[k]) * p.factor;
  }
}

// Adds to x the result for a layer's inputs, which lie `stride` numbers apart.
void add_input(const LayerInput& p, const float* inputs, int stride, float* x, int n, int threads, int prologue) {
  const int size = p.gate->out;
  float *gates = scratch<float, 32>(size_t(n) * size), *both = scratch<float, 33>(size_t(n) * 2 * size);
  apply(p.gate, x, gates, n, 0, threads, NONE, nullptr, 0);
  for (int i = 0; i < n; i++) {
    std::memcpy(both + size_t(i) * 2 * size, gates + size_t(i) * size, size * sizeof(float));
    std::memcpy(both + (size_t(i) * 2 + 1) * size, inputs + size_t(i) * stride, size * sizeof(float));
  }
  add(p.projection, both, x, n, threads, prologue, p.norm);
}

// Adds to x (n, width) the attention or delta net of a layer, for the tokens of `count` texts. `recurring`: the number
// of delta nets before this layer.
void add_attended(const Layer& layer, const Text* texts, int count, int recurring, float* x, int n, int threads) {
  const int inputs = layer.qkv->out, outputs = layer.output->in;
  float* projected = scratch<float, 8>(size_t(n) * inputs);
  float* attended = scratch<float, 9>(size_t(n) * outputs);
  Pass* passes = scratch<Pass, 18>(count);
  Scan* scans = scratch<Scan, 26>(count);
  apply_normed(layer.qkv, x, projected, n, threads, layer.attention_norm);
  for (int i = 0; layer.query_norm.weight && i < n; i++) {
    const Attention& a = *layer.attention;
    float *queries = projected + size_t(i) * inputs, *keys = queries + size_t(a.heads) * a.size;
    normalise_each(queries, a.heads * a.size, layer.query_norm);
    if (a.reused) continue;
    normalise_each(keys, a.key_heads * a.size, layer.key_norm);
    if (layer.value_norm.weight) normalise_each(keys + size_t(a.key_heads) * a.size, a.key_heads * a.size, layer.value_norm);
  }
  for (int t = 0, row = 0; t < count; row += texts[t++].count) {
    const Text& text = texts[t];
    const float* from = projected + size_t(row) * inputs;
    float* to = attended + size_t(row) * outputs;
    if (layer.delta)
      scans[t] = {layer.delta, from, to, recurring, text.count, &text.recall};
    else
      passes[t] = {layer.attention, from, text.cos_sin, text.caches[layer.cache], to, text.capacity, text.start, text.count,
                   text.tree};
  }
  if (layer.delta)
    recur(scans, count, threads);
  else
    attend(passes, count, threads);
  add(layer.output, attended, x, n, threads, NONE, layer.after_attention);
}

// Adds to x (n, width) a layer's feed-forward part.
void add_fed(const Layer& layer, int gate, float* x, int n, int threads) {
  if (!layer.up) return mix(*layer.mixture, layer.mlp_norm, x, x, n, threads);
  float* both = scratch<float, 10>(size_t(n) * layer.up->out);
  apply_normed(layer.up, x, both, n, threads, layer.mlp_norm);
  if (!layer.mixture) return add(layer.down, both, x, n, threads, gate, layer.after_mlp);
  const int width = layer.down->out;
  const Beside& beside = layer.beside;
  float *sums = scratch<float, 34>(size_t(n) * width), *mixed = scratch<float, 35>(size_t(n) * width);
  std::fill_n(sums, size_t(n) * width, 0.0f);
  std::fill_n(mixed, size_t(n) * width, 0.0f);
  add(layer.down, both, sums, n, threads, gate, beside.after_dense);
  mix(*layer.mixture, beside.before, x, mixed, n, threads);
  add_normed(mixed, beside.after, sums, n);
  add_normed(sums, layer.after_mlp, x, n);
}

// From the rows x (n, width) of the texts in turn, copies those whose logits are wanted one behind the other to `to`,
// which may be x.
void gather(const Text* texts, int count, const float* x, int width, float* to) {
  for (int t = 0; t < count; x += size_t(texts[t++].count) * width) {
    const size_t skipped = size_t(texts[t].count - texts[t].rows) * width, wanted = size_t(texts[t].rows) * width;
    std::memmove(to, x + skipped, wanted * sizeof(float));
    to += wanted;
  }
}

// Reduces each text to the tokens whose logits are wanted, as a pass behind its other tokens.
void shorten(Text* texts, int count, int stride) {
  for (Text* text = texts; text < texts + count; text++) {
    const int skipped = text->count - text->rows;
    text->count = text->rows;
    if (text->tree) continue;
    text->start += skipped;
    text->cos_sin += size_t(skipped) * stride;
  }
}

// Copies rows x (n, width) of the texts in turn to their places among the features, where the tap numbered `tap` of
// `taps` lies.
void keep(const Text* texts, int count, const float* x, int width, int taps, int tap) {
  for (int t = 0; t < count; x += size_t(texts[t++].count) * width) {
    float* to = texts[t].features.kept;
    if (!to) continue;
    for (int i = 0; i < texts[t].count; i++)
      std::copy_n(x + size_t(i) * width, width, to + (size_t(texts[t].place() + i) * taps + tap) * width);
  }
}

// Copies the rows x that are the residual stream before a layer, wherever features are kept of it.
void keep_before(const Decoder& d, int layer, const Text* texts, int count, const float* x, int width) {
  const int taps = int(d.taps.size());
  for (int tap = 0; tap < taps; tap++)
    if (d.taps[tap] == layer) keep(texts, count, x, width, taps, tap);
}

// Caps logits (count,). Each uses the same vector operations wherever it stands, so its result does not depend on that.
void cap_logits(float* logits, size_t count, float softcap, int threads) {
  run(threads, [&](int64_t number, int64_t parts) {
    const size_t whole = count / LANES, end = whole * (number + 1) / parts * LANES;
    for (size_t i = whole * number / parts * LANES; i < end; i += LANES) at(logits + i) = capped(at(logits + i), softcap);
    if (number + 1 < parts) return;
    float rest[LANES] = {};
    std::copy(logits + end, logits + count, rest);
    at(rest) = capped(at(rest), softcap);
    std::copy_n(rest, count - end, logits + end);
  });
}

// Runs a pass over tokens (n,), those of each of `count` texts in turn, and writes logits (all rows, vocab) in the same
// order. The weights are read once for all texts, and a text's logits do not depend on the others. Returns false,
// without doing anything, if a token is outside the vocabulary. A head takes one text.
bool decode(const Decoder& d, const int64_t* tokens, const Text* given, int count, float* logits, int threads) {
  int n = 0, rows = 0, recurring = 0;
  bool featured = false;
  Text* texts = scratch<Text, 36>(count);
  std::copy_n(given, count, texts);
  for (int t = 0; t < count; t++) n += texts[t].count, rows += texts[t].rows, featured |= !!texts[t].features.kept;
  for (int i = 0; i < n; i++)
    if (tokens[i] < 0 || tokens[i] >= d.vocab) return false;
  const int width = d.head->in, size = d.inputs.norm.width, stride = d.inputs.embedding.width, writing = d.writing();
  // Where features are the final residual stream of a single text, the stream is computed where they are kept.
  const bool final_ones = d.taps.empty();
  float* kept = count == 1 && final_ones ? texts->features.kept : nullptr;
  float* x = kept ? kept + size_t(texts->place()) * width : scratch<float, 7>(size_t(n) * width);
  if (d.fuse.linear)
    fuse(d, tokens, *texts, x, threads);
  else
    for (int i = 0; i < n; i++) embed(d.embedding, tokens[i], x + size_t(i) * width);
  float* inputs = scratch<float, 37>(size_t(n) * stride);
  if (d.inputs.projection) per_layer_inputs(d.inputs, tokens, x, inputs, n, threads);
  for (int number = 0; number < int(d.layers.size()); number++) {
    const Layer& layer = d.layers[number];
    if (d.stream) d.stream->wait(number);
    if (featured) keep_before(d, number, texts, count, x, width);
    if (n) add_attended(layer, texts, count, recurring, x, n, threads);
    recurring += !!layer.delta;
    if (number + 1 == writing && !featured) {  // later tokens read nothing else: keep only rows with wanted logits
      gather(texts, count, x, width, x);
      gather(texts, count, inputs, stride, inputs);
      shorten(texts, count, d.stride);
      n = rows;
      if (!n && !d.stream) break;
    }
    if (n) {
      add_fed(layer, d.gate, x, n, threads);
      if (layer.input.gate) add_input(layer.input, inputs + size_t(number) * size, stride, x, n, threads, d.gate);
      for (size_t i = 0; layer.factor != 1 && i < size_t(n) * width; i++) x[i] *= layer.factor;
    }
    if (d.stream) d.stream->done(number);
  }
  if (!final_ones)
    keep_before(d, int(d.layers.size()), texts, count, x, width);
  else if (count > 1)
    keep(texts, count, x, width, 1, 0);
  const float* wanted = x + size_t(n - rows) * width;
  if (count > 1) {
    float* gathered = scratch<float, 19>(size_t(rows) * width);
    gather(texts, count, x, width, gathered);
    wanted = gathered;
  }
  if (rows) apply_normed(d.head, wanted, logits, rows, threads, d.final_norm);
  if (d.softcap) cap_logits(logits, size_t(rows) * d.head->out, d.softcap, threads);
  return true;
}

}  // namespace

// A whole pass of a decoder made of the usual parts (FAMILIES of families.py says whose they are): RMS norms, rotary attention or
// gated delta nets, a feed-forward part or a mixture of experts. One call, so that nothing else runs between two layers.

#pragma once

#include "attention.h"
#include "delta.h"
#include "mixture.h"
#include "stream.h"

namespace {

// `query_norm` and `key_norm` are of a head, or of all queries and all keys of a token; the `after` ones of what is added
// to the residual. `query_weight` and `sinks` as in Pass. With a delta net `qkv` is its projection, and what says how to attend
// does not count. With a mixture there are no `up`, `down` and `after_mlp`.
struct Layer {
  const Linear *qkv, *output, *up, *down;
  Norm attention_norm, mlp_norm, query_norm, key_norm, after_attention, after_mlp;
  float scale;
  int32_t key_rope, query_rope;
  const float* query_weight;
  int32_t window;
  const DeltaNet* delta;
  const Mixture* mixture;
  const float* sinks;
};

// How a head reads: linear([token_norm(embedding of a token), feature_norm(feature of the token before it)]), or not at all
// where there is no linear layer.
struct Fuse {
  const Linear* linear;
  Norm token_norm, feature_norm;
};

// Hidden states by position, (length, width), as the last layer leaves them before the final norm: where a pass leaves
// those of its tokens, or null; and for a head those that it reads, of the first `known` tokens in `given`, of others its own.
struct Features {
  float* kept = nullptr;
  const float* given = nullptr;
  int known = 0;
};

// What a pass appends to one text: `count` tokens behind `start` others; logits are wanted of the last `rows` of them.
// `cos_sin` by position (ropes, size / 2, 2), `caches`, one for each layer that attends (2, key heads, capacity, size), and
// `tree` as in attention.h, `recall` as in delta.h, where there are delta nets. These take no trees.
struct Text {
  int count, rows;
  const float* cos_sin;
  float* const* caches;
  int64_t capacity;
  int start;
  Features features;
  const Tree* tree = nullptr;
  Recall recall = {};

  // Where the new tokens lie.
  int place() const { return tree ? start + int(tree->parents.size()) - count : start; }
};

struct Decoder {
  std::vector<Layer> layers;
  const Attention* attention;
  const Linear* head;
  const void* embedding;  // (vocab, width), float32 or bfloat16
  Norm final_norm;
  float factor;  // of what is embedded
  int32_t gate;  // Prologue of the layers `down`
  bool half;     // the embedding is bfloat16
  int32_t vocab;
  Fuse fuse;
  Stream* stream;  // what reads the weights of some layers, or null
};

// A row of the embedding, (width,). Half as wide numbers times the factor are rounded to as many bits, as transformers does.
inline void embed(const Decoder& d, int64_t token, float* x) {
  const int width = d.head->in;
  const size_t place = size_t(token) * width;
  for (int k = 0; k < width; k++) {
    if (!d.half) {
      x[k] = ((const float*)d.embedding)[place + k] * d.factor;
      continue;
    }
    uint32_t bits = uint32_t(((const uint16_t*)d.embedding)[place + k]) << 16;
    std::memcpy(x + k, &bits, 4);
    x[k] *= d.factor;
    std::memcpy(&bits, x + k, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    if (d.factor != 1) std::memcpy(x + k, &bits, 4);
  }
}

// As many numbers as the norm has after one another, in place.
void normalise_each(float* x, int count, const Norm& norm) {
  for (const float* end = x + count; x < end; x += norm.width) {
    const float factor = rms_factor(x, norm.width, norm.eps);
    for (int k = 0; k < norm.width; k++) x[k] *= factor * norm.weight[k];
  }
}

// What a head makes of the tokens (n,) of a text: x (n, width). Nothing stands before the first token, and its feature
// is zero; that of every other but the first of the n is known.
void fuse(const Decoder& d, const int64_t* tokens, const Text& text, float* x, int threads) {
  const int width = d.head->in, n = text.count;
  const Features& features = text.features;
  float* both = scratch<float, 17>(size_t(n) * 2 * width);
  for (int i = 0; i < n; i++) {
    float* row = both + size_t(i) * 2 * width;
    embed(d, tokens[i], row);
    normalise(row, d.fuse.token_norm, row);
    const int before = text.start + i - 1;
    if (before < 0)
      std::memset(row + width, 0, width * sizeof(float));
    else
      normalise((before < features.known ? features.given : features.kept) + size_t(before) * width, d.fuse.feature_norm,
                row + width);
  }
  apply(d.fuse.linear, both, x, n, 0, threads, NONE, nullptr, 0);
}

// A linear layer of what the norm, if there is one, makes of x.
void apply_normed(const Linear* p, const float* x, float* y, int n, int threads, const Norm& norm) {
  apply(p, x, y, n, 0, threads, norm.weight ? RMS_NORM : NONE, norm.weight, norm.eps);
}

// y (n, out) of a linear layer added to x, after the norm if there is one.
void add(const Linear* p, const float* from, float* x, int n, int threads, int prologue, const Norm& norm) {
  if (!norm.weight) return apply(p, from, x, n, 1, threads, prologue, nullptr, 0);
  float* y = scratch<float, 15>(size_t(n) * p->out);
  apply(p, from, y, n, 0, threads, prologue, nullptr, 0);
  for (int i = 0; i < n; i++) {
    float *sum = x + size_t(i) * p->out, *term = y + size_t(i) * p->out;
    const float factor = rms_factor(term, p->out, norm.eps);
    for (int k = 0; k < p->out; k++) sum[k] += term[k] * factor * norm.weight[k];
  }
}

// Tokens (n,), those of each of `count` texts in turn, to logits (all rows, vocab) in the same order. The weights are read once
// for all, and a text's logits do not depend on the others. False, and nothing done, where a token is none of the vocabulary.
// A head has one text, and that is no tree.
bool decode(const Decoder& d, const int64_t* tokens, const Text* texts, int count, float* logits, int threads) {
  int n = 0, rows = 0;
  for (int t = 0; t < count; t++) n += texts[t].count, rows += texts[t].rows;
  for (int i = 0; i < n; i++)
    if (tokens[i] < 0 || tokens[i] >= d.vocab) return false;
  const Attention& a = *d.attention;
  const int width = d.head->in;
  int inner = 0, inputs = 0, mixed = 0;
  for (const Layer& layer : d.layers) {
    if (layer.up) inner = std::max(inner, layer.up->out);
    inputs = std::max(inputs, layer.qkv->out);
    mixed = std::max(mixed, layer.output->in);
  }
  // Features are the residual stream where it ends: those of one text are added up in their own place.
  float* kept = count == 1 ? texts->features.kept : nullptr;
  float* x = kept ? kept + size_t(texts->place()) * width : scratch<float, 7>(size_t(n) * width);
  float* projected = scratch<float, 8>(size_t(n) * inputs);
  float* attended = scratch<float, 9>(size_t(n) * mixed);
  float* both = scratch<float, 10>(size_t(n) * inner);
  Pass* passes = scratch<Pass, 18>(count);
  Scan* scans = scratch<Scan, 26>(count);
  if (d.fuse.linear)
    fuse(d, tokens, *texts, x, threads);
  else
    for (int i = 0; i < n; i++) embed(d, tokens[i], x + size_t(i) * width);
  int attending = 0, recurring = 0;
  for (const Layer& layer : d.layers) {
    if (d.stream) d.stream->wait(int(&layer - d.layers.data()));
    apply_normed(layer.qkv, x, projected, n, threads, layer.attention_norm);
    for (int i = 0; layer.query_norm.weight && i < n; i++) {
      float *queries = projected + size_t(i) * a.row(), *keys = queries + size_t(a.heads) * a.size;
      normalise_each(queries, a.heads * a.size, layer.query_norm);
      normalise_each(keys, a.key_heads * a.size, layer.key_norm);
    }
    for (int t = 0, row = 0; t < count; row += texts[t++].count) {
      const Text& text = texts[t];
      const float* from = projected + size_t(row) * layer.qkv->out;
      float* to = attended + size_t(row) * layer.output->in;
      if (layer.delta)
        scans[t] = {layer.delta, from, to, recurring, text.count, &text.recall};
      else
        passes[t] = {&a, from, text.cos_sin + size_t(layer.key_rope) * a.size, text.cos_sin + size_t(layer.query_rope) * a.size,
                     layer.query_weight, text.caches[attending], to, text.capacity, text.start, text.count, layer.window,
                     layer.scale, layer.sinks, text.tree};
    }
    if (layer.delta) {
      recur(scans, count, threads);
      recurring++;
    } else {
      attend(passes, count, threads);
      attending++;
    }
    add(layer.output, attended, x, n, threads, NONE, layer.after_attention);
    if (layer.mixture) {
      mix(*layer.mixture, layer.mlp_norm, x, n, threads);
    } else {
      apply_normed(layer.up, x, both, n, threads, layer.mlp_norm);
      add(layer.down, both, x, n, threads, d.gate, layer.after_mlp);
    }
    if (d.stream) d.stream->done(int(&layer - d.layers.data()));
  }
  const float* wanted = x + size_t(n - rows) * width;
  if (count > 1) {
    float* gathered = scratch<float, 19>(size_t(rows) * width);
    wanted = gathered;
    const float* row = x;
    for (int t = 0; t < count; row += size_t(texts[t++].count) * width) {
      const Text& text = texts[t];
      std::memcpy(gathered, row + size_t(text.count - text.rows) * width, size_t(text.rows) * width * sizeof(float));
      gathered += size_t(text.rows) * width;
      if (text.features.kept)
        std::memcpy(text.features.kept + size_t(text.place()) * width, row, size_t(text.count) * width * sizeof(float));
    }
  }
  if (rows) apply_normed(d.head, wanted, logits, rows, threads, d.final_norm);
  return true;
}

}  // namespace

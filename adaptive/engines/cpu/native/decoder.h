// A whole pass of a decoder made of the usual parts (Llama, Mistral, Qwen 2 and 3, Gemma 3): RMS norms, rotary attention, a
// gated feed-forward part. One call, so that nothing else runs between two layers.

#pragma once

#include "attention.h"
#include "linear.h"

namespace {

// An RMS norm as in Prologue, or none where there is no weight.
struct Norm {
  const float* weight;
  float eps;
};

// `qk_norm` is that of each head's queries and keys, (heads + key heads, size); the `after` ones what is
// added to the residual.
struct Layer {
  const Linear *qkv, *output, *up, *down;
  Norm attention_norm, mlp_norm, qk_norm, after_attention, after_mlp;
  float scale;
  int32_t rope, window;
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
// `cos_sin` by position (ropes, size / 2, 2), `caches`, one for each layer (2, key heads, capacity, size), and `tree` as in
// attention.h.
struct Text {
  int count, rows;
  const float* cos_sin;
  float* const* caches;
  int64_t capacity;
  int start;
  Features features;
  const Tree* tree = nullptr;

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

void normalise(const float* x, int width, const Norm& norm, float* out) {
  const float factor = rms_factor(x, width, norm.eps);
  for (int k = 0; k < width; k++) out[k] = x[k] * factor * norm.weight[k];
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
    normalise(row, width, d.fuse.token_norm, row);
    const int before = text.start + i - 1;
    if (before < 0)
      std::memset(row + width, 0, width * sizeof(float));
    else
      normalise((before < features.known ? features.given : features.kept) + size_t(before) * width, width,
                d.fuse.feature_norm, row + width);
  }
  apply(d.fuse.linear, both, x, n, 0, threads, NONE, nullptr, 0);
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
  const int width = d.head->in, inner = d.layers.empty() ? 0 : d.layers[0].up->out;
  const int normed = a.heads + a.key_heads, heads = normed + a.key_heads;
  // Features are the residual stream where it ends: those of one text are added up in their own place.
  float* kept = count == 1 ? texts->features.kept : nullptr;
  float* x = kept ? kept + size_t(texts->place()) * width : scratch<float, 7>(size_t(n) * width);
  float* projected = scratch<float, 8>(size_t(n) * heads * a.size);
  float* attended = scratch<float, 9>(size_t(n) * a.heads * a.size);
  float* both = scratch<float, 10>(size_t(n) * inner);
  Pass* passes = scratch<Pass, 18>(count);
  if (d.fuse.linear)
    fuse(d, tokens, *texts, x, threads);
  else
    for (int i = 0; i < n; i++) embed(d, tokens[i], x + size_t(i) * width);
  for (size_t i = 0; i < d.layers.size(); i++) {
    const Layer& layer = d.layers[i];
    apply(layer.qkv, x, projected, n, 0, threads, RMS_NORM, layer.attention_norm.weight, layer.attention_norm.eps);
    if (layer.qk_norm.weight)
      for (int j = 0; j < n * normed; j++) {
        float* head = projected + (size_t(j / normed) * heads + j % normed) * a.size;
        const float *weight = layer.qk_norm.weight + size_t(j % normed) * a.size;
        const float factor = rms_factor(head, a.size, layer.qk_norm.eps);
        for (int k = 0; k < a.size; k++) head[k] *= factor * weight[k];
      }
    for (int t = 0, row = 0; t < count; row += texts[t++].count) {
      const Text& text = texts[t];
      passes[t] = {&a, projected + size_t(row) * heads * a.size, text.cos_sin + size_t(layer.rope) * a.size, text.caches[i],
                   attended + size_t(row) * a.heads * a.size, text.capacity, text.start, text.count, layer.window, layer.scale,
                   text.tree};
    }
    attend(passes, count, threads);
    add(layer.output, attended, x, n, threads, NONE, layer.after_attention);
    apply(layer.up, x, both, n, 0, threads, RMS_NORM, layer.mlp_norm.weight, layer.mlp_norm.eps);
    add(layer.down, both, x, n, threads, d.gate, layer.after_mlp);
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
  if (rows) apply(d.head, wanted, logits, rows, 0, threads, RMS_NORM, d.final_norm.weight, d.final_norm.eps);
  return true;
}

}  // namespace

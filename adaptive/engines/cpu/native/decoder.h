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

// What a head makes of tokens (n,) behind `start` others: x (n, width). Nothing stands before the first token, and its feature
// is zero; that of every other but the first of the n is known.
void fuse(const Decoder& d, const int64_t* tokens, int n, int start, const Features& features, float* x, int threads) {
  const int width = d.head->in;
  float* both = scratch<float, 17>(size_t(n) * 2 * width);
  for (int i = 0; i < n; i++) {
    float* row = both + size_t(i) * 2 * width;
    embed(d, tokens[i], row);
    normalise(row, width, d.fuse.token_norm, row);
    const int before = start + i - 1;
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

// Tokens (n,) after `start` others to logits (rows, vocab) of the last of them. `cos_sin` (n, ropes, size / 2, 2) and
// `caches`, one for each layer (2, key heads, capacity, size), as in attention.h. False, and nothing done, where a token is
// none of the vocabulary.
bool decode(const Decoder& d, const int64_t* tokens, int n, int rows, const float* cos_sin, float* const* caches,
           int64_t capacity, int start, const Features& features, float* logits, int threads) {
  for (int i = 0; i < n; i++)
    if (tokens[i] < 0 || tokens[i] >= d.vocab) return false;
  const Attention& a = *d.attention;
  const int width = d.head->in, inner = d.layers.empty() ? 0 : d.layers[0].up->out;
  const int normed = a.heads + a.key_heads, heads = normed + a.key_heads;
  // Features are the residual stream where it ends: kept, they are added up in their own place.
  float* x = features.kept ? features.kept + size_t(start) * width : scratch<float, 7>(size_t(n) * width);
  float* projected = scratch<float, 8>(size_t(n) * heads * a.size);
  float* attended = scratch<float, 9>(size_t(n) * a.heads * a.size);
  float* both = scratch<float, 10>(size_t(n) * inner);
  if (d.fuse.linear)
    fuse(d, tokens, n, start, features, x, threads);
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
    attend(&a, projected, cos_sin + size_t(layer.rope) * a.size, caches[i], attended, capacity, start, n, layer.window, layer.scale,
           threads);
    add(layer.output, attended, x, n, threads, NONE, layer.after_attention);
    apply(layer.up, x, both, n, 0, threads, RMS_NORM, layer.mlp_norm.weight, layer.mlp_norm.eps);
    add(layer.down, both, x, n, threads, d.gate, layer.after_mlp);
  }
  if (rows)
    apply(d.head, x + size_t(n - rows) * width, logits, rows, 0, threads, RMS_NORM, d.final_norm.weight,
            d.final_norm.eps);
  return true;
}

}  // namespace

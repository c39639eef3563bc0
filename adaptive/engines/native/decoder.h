// A whole pass of a decoder made of the usual parts (Llama, Mistral, Qwen 2): RMS norms, rotary attention, a feed-forward
// part gated by SiLU. One call for a few tokens, so that nothing else runs between two layers.

#pragma once

#include "attention.h"
#include "products.h"

extern "C" {
// The same in kernels.py.
struct Layer {
  const Product *project, *output, *up, *down;
  const float *attention_norm, *mix_norm;
  float attention_side, mix_side, scale;
  int32_t rope, window;
};

struct Decoder {
  const Layer* layers;
  const Attention* attention;
  const Product* head;
  const float* final_norm;
  const void* embedding;  // (vocab, width), float32 or bfloat16
  float final_side;
  int32_t count, half, vocab;
};

// Tokens (n,) after `start` others to logits (rows, vocab) of the last of them. `turns` (n, ropes, size / 2, 2) and
// `caches`, one for each layer (2, key heads, capacity, size), as in attention.h. False, and nothing done, where a token is
// none of the vocabulary.
int decode(const Decoder* decoder, const int64_t* tokens, int n, int rows, const float* turns, float* const* caches,
           int64_t capacity, int start, float* logits, int threads) {
  const Decoder& d = *decoder;
  for (int i = 0; i < n; i++)
    if (tokens[i] < 0 || tokens[i] >= d.vocab) return 0;
  const Attention& a = *d.attention;
  const int width = d.head->in, inner = d.count ? d.layers[0].up->out : 0;
  float* x = room<float, 7>(size_t(n) * width);
  float* mixed = room<float, 8>(size_t(n) * (a.heads + 2 * a.key_heads) * a.size);
  float* seen = room<float, 9>(size_t(n) * a.heads * a.size);
  float* both = room<float, 10>(size_t(n) * inner);
  for (int i = 0; i < n; i++)
    for (int k = 0; k < width; k++) {
      const size_t place = size_t(tokens[i]) * width + k;
      if (d.half) {
        const uint32_t bits = uint32_t(((const uint16_t*)d.embedding)[place]) << 16;
        std::memcpy(x + size_t(i) * width + k, &bits, 4);
      } else {
        x[size_t(i) * width + k] = ((const float*)d.embedding)[place];
      }
    }
  for (int i = 0; i < d.count; i++) {
    const Layer& layer = d.layers[i];
    product(layer.project, x, mixed, n, 0, threads, RMS_NORM, layer.attention_norm, layer.attention_side);
    attend(&a, mixed, turns + size_t(layer.rope) * a.size, caches[i], seen, capacity, start, n, layer.window, layer.scale,
           threads);
    product(layer.output, seen, x, n, 1, threads, NOTHING, nullptr, 0);
    product(layer.up, x, both, n, 0, threads, RMS_NORM, layer.mix_norm, layer.mix_side);
    product(layer.down, both, x, n, 1, threads, SILU_GATE, nullptr, 0);
  }
  if (rows)
    product(d.head, x + size_t(n - rows) * width, logits, rows, 0, threads, RMS_NORM, d.final_norm, d.final_side);
  return 1;
}
}

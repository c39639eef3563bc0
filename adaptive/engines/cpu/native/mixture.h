// Mixtures of experts: for every token a router chooses a few of many feed-forward parts, whose results are added, each times its
// share. Tokens are grouped by expert, so that a pass reads the weights of each expert that some token chose once, and of
// others nothing.
//
// A token's experts, and the order in which their results are added, do not depend on the tokens that it is computed with.

#pragma once

#include "linear.h"

namespace {

// An RMS norm of `width` numbers as in Prologue, or none where there is no weight.
struct Norm {
  const float* weight;
  float eps;
  int32_t width;
};

void normalise(const float* x, const Norm& norm, float* out) {
  const float factor = rms_factor(x, norm.width, norm.eps);
  for (int k = 0; k < norm.width; k++) out[k] = x[k] * factor * norm.weight[k];
}

// `up` gives an expert's gate and what it gates in a row, `down` takes it through the prologue `gate`, with `limits` where that has
// some. A `shared` expert is the last of them: every token's. The router scores the others; if it gives one number more, the
// sigmoid of that is the shared one's share, else it is 1. Shares are the softmax of the scores, or the `sigmoid` of each,
// divided by the sum of those of the `top_k` chosen where they are `normalised`, times a `factor`, and times the expert's of `scales`
// (experts,) if there are any. They are chosen by share, plus the `bias` (experts,) if there is one. The router reads through a
// norm of its own, `router_norm`, where it has one.
struct Mixture {
  const Linear* router;
  std::vector<const Linear*> up, down;
  int32_t top_k;
  bool sigmoid, normalised, shared;
  float factor;
  const float* bias;
  int32_t gate;
  const float* limits;
  Norm router_norm;
  const float* scales;

  int experts() const { return int(up.size()) - shared; }
};

// The norms of a mixture beside a dense part: of what it reads, of what it makes, and of what the dense part makes.
struct Beside {
  Norm before, after, after_dense;
};

// Rows of one linear layer.
struct Job {
  const Linear* linear;
  const float* x;
  float* y;
  int rows;
};

// What a panel costs beside its rows, in rows: reading it. Larger, and threads get unequal parts of a prompt; smaller, of a few tokens.
constexpr int READING = 16;

// All jobs. A thread gets panels one after the other, of as many jobs as it takes.
void apply_all(const Job* jobs, int count, int threads, int prologue, const float* norm) {
  const auto each = [&](const Job& job) { return int64_t(job.linear->in) * (job.rows + READING); };
  int64_t all = 0;
  for (int i = 0; i < count; i++) all += each(jobs[i]) * panels_of(*jobs[i].linear);
  run(threads, [&](int64_t number, int64_t parts) {
    const int64_t begin = all / parts * number, end = number + 1 == parts ? all : all / parts * (number + 1);
    int64_t before = 0;
    for (int i = 0; i < count; i++) {
      const Job& job = jobs[i];
      const int64_t cost = each(job), panels = panels_of(*job.linear);
      // The first panel that begins at or behind a place.
      const auto panel = [&](int64_t place) { return std::clamp((place - before + cost - 1) / cost, int64_t(0), panels); };
      if (begin < before + cost * panels && before < end)
        multiply_panels({*job.linear, job.x, job.y, job.rows, 0, prologue, norm, 0}, panel(begin), panel(end));
      before += cost * panels;
    }
  });
}

// The experts of a token, (top_k,), and their shares, from its scores; the best first, and of equal ones the earlier.
void choose(const Mixture& m, const float* scores, int32_t* chosen, float* shares) {
  const int count = m.experts();
  float *all = scratch<float, 50>(2 * size_t(count)), *left = all + count;
  const float top = *std::max_element(scores, scores + count);
  float sum = 0, kept = 0;
  for (int e = 0; e < count; e++) {
    all[e] = m.sigmoid ? 1 / (1 + std::exp(-scores[e])) : std::exp(scores[e] - top);
    left[e] = all[e] + (m.bias ? m.bias[e] : 0.0f);
    sum += all[e];
  }
  for (int j = 0; j < m.top_k; j++) {
    const int best = int(std::max_element(left, left + count) - left);
    chosen[j] = best, shares[j] = all[best];
    kept += all[best];
    left[best] = -INFINITY;
  }
  const float whole = m.normalised ? kept : m.sigmoid ? 1.0f : sum;
  for (int j = 0; j < m.top_k; j++) shares[j] *= m.factor / whole * (m.scales ? m.scales[chosen[j]] : 1.0f);
}

// What the experts make of the rows of x (n, width) behind the norm, added to those of y, which may be x.
void mix(const Mixture& m, const Norm& norm, const float* x, float* y, int n, int threads) {
  const int width = m.router->in, count = m.experts(), k = m.top_k, scored = m.router->out;
  const int inner = m.up[0]->out, shared_inner = m.shared ? m.up[count]->out : 0;
  const size_t slots = size_t(n) * k;
  float* normed = scratch<float, 40>(n * size_t(width));
  float* scores = scratch<float, 41>(n * size_t(scored));
  int32_t* chosen = scratch<int32_t, 42>(slots);
  float* shares = scratch<float, 43>(slots);
  for (int i = 0; i < n; i++) normalise(x + size_t(i) * width, norm, normed + size_t(i) * width);
  const Norm& own = m.router_norm;
  apply(m.router, own.weight ? x : normed, scores, n, 0, threads, own.weight ? RMS_NORM : NONE, own.weight, own.eps);
  for (int i = 0; i < n; i++) choose(m, scores + size_t(i) * scored, chosen + size_t(i) * k, shares + size_t(i) * k);
  // Where the rows of each expert begin, and the row of each token's choice.
  int32_t* begin = scratch<int32_t, 44>(count + 1);
  int32_t* row = scratch<int32_t, 45>(slots);
  std::fill(begin, begin + count + 1, 0);
  for (size_t slot = 0; slot < slots; slot++) row[slot] = begin[chosen[slot] + 1]++;
  for (int e = 0; e < count; e++) begin[e + 1] += begin[e];
  for (size_t slot = 0; slot < slots; slot++) row[slot] += begin[chosen[slot]];
  float* inputs = scratch<float, 46>(slots * width);
  float* both = scratch<float, 47>(slots * inner + size_t(n) * shared_inner);
  float* outputs = scratch<float, 48>((slots + n) * width);
  for (size_t slot = 0; slot < slots; slot++)
    std::memcpy(inputs + size_t(row[slot]) * width, normed + slot / k * width, width * sizeof(float));
  Job* jobs = scratch<Job, 49>(2 * (count + 1));
  Job* then = jobs + count + 1;
  int used = 0;
  const auto add = [&](int e, const float* from, float* between, float* to, int rows) {
    jobs[used] = {m.up[e], from, between, rows};
    then[used++] = {m.down[e], between, to, rows};
  };
  for (int e = 0; e < count; e++)
    if (begin[e] < begin[e + 1])
      add(e, inputs + size_t(begin[e]) * width, both + size_t(begin[e]) * inner, outputs + size_t(begin[e]) * width,
          begin[e + 1] - begin[e]);
  if (m.shared) add(count, normed, both + slots * inner, outputs + slots * width, n);
  apply_all(jobs, used, threads, NONE, nullptr);
  apply_all(then, used, threads, m.gate, m.limits);
  run(n > 1 ? threads : 1, [&](int number, int parts) {
    for (int i = number; i < n; i += parts) {
      float* sum = y + size_t(i) * width;
      const auto add = [&](const float* term, float share) {
        for (int j = 0; j < width; j++) sum[j] += term[j] * share;
      };
      for (size_t slot = size_t(i) * k; slot < size_t(i + 1) * k; slot++) add(outputs + size_t(row[slot]) * width, shares[slot]);
      const float* gate = scores + size_t(i) * scored + count;
      if (m.shared) add(outputs + (slots + i) * width, scored > count ? 1 / (1 + std::exp(-*gate)) : 1.0f);
    }
  });
}

}  // namespace

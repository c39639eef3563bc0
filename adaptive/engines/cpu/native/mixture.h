// Mixtures of experts: a router chooses a few of many feed-forward parts for every token, and their results are added,
// each times its share. Tokens are grouped by expert, so a pass reads the weights of each chosen expert once, and no
// others.
//
// A token's experts, and the order in which their results are added, do not depend on the other tokens of the pass.

#pragma once

#include "linear.h"

namespace {

// An RMS norm over `width` numbers as in Prologue; no norm if `weight` is null.
struct Norm {
  const float* weight;
  float eps;
  int32_t width;
};

void normalise(const float* x, const Norm& norm, float* out) {
  const float factor = rms_factor(x, norm.width, norm.eps);
  for (int k = 0; k < norm.width; k++) out[k] = x[k] * factor * norm.weight[k];
}

// A mixture. `up` gives an expert's gate and up projection in a row; `down` reads them through the prologue `gate`,
// with its `limits` if it has any. The last expert may be `shared`, for every token. The router scores the others; if
// it has one more output, the sigmoid of that is the shared expert's share, which is 1 otherwise. Shares are the
// softmax of the scores, or the `sigmoid` of each; if `normalised`, divided by the sum over the `top_k` chosen; times
// `factor`, and times the expert's number in `scales` (experts,) unless null. The experts with the largest share, plus
// their `bias` (experts,) unless null, are chosen. The router reads through its own norm, `router_norm`, if it has one.
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

// The norms of a mixture beside a dense part: of the mixture's input, of its result, and of the dense part's result.
struct Beside {
  Norm before, after, after_dense;
};

// The product of one linear layer and some rows.
struct Job {
  const Linear* linear;
  const float* x;
  float* y;
  int rows;
};

// The cost of reading a panel, in rows. Too high: threads get unequal work for a prompt. Too low: for a few tokens.
constexpr int READING = 16;

// Runs all jobs. A thread gets panels in a row, of several jobs if needed, so that all threads have the same cost.
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
      // The first panel that begins at or behind `place`.
      const auto panel = [&](int64_t place) { return std::clamp((place - before + cost - 1) / cost, int64_t(0), panels); };
      if (begin < before + cost * panels && before < end)
        multiply_panels({*job.linear, job.x, job.y, job.rows, 0, prologue, norm, 0}, panel(begin), panel(end));
      before += cost * panels;
    }
  });
}

// Chooses the experts (top_k,) of a token and their shares from its scores: best first, of equal ones the first.
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

// Adds the experts' results for the rows of x (n, width), which are normalised first, to those of y, which may be x.
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
  // The first row of each expert, and the row of each choice of a token.
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

// From logits to tokens, a row at a time; the mathematics is in vlm_kernels/sampling.py.
//
//   greedy:  the first of the largest logits, in one pass over the row as it lies
//   drawn:   row -> float32, edited -> weights in place -> what is kept -> sums of blocks -> token
//   masked:  tokens outside the mask are minus infinity, in a copy if log-probabilities are wanted
//
// Weights are whole numbers below 2^35 and float32 holds each exactly, so double holds every sum of
// them, and no result depends on the order of additions, on lanes or on threads.
#include "sampling.h"

#include <algorithm>
#include <cmath>

#include "sampling_ranks.h"
#include "threads.h"

namespace triptych {

// As sampling.py lays it out.
struct SampledRow {
  uint64_t seed;
  int64_t index;      // of the token in its answer
  float temperature;  // 0 is greedy
  float top_p, min_p;
  int32_t top_k;         // 0 is all
  int32_t num_logprobs;  // -1 is none
  int32_t edit;          // which of the edits is this row's; -1 is none
  int32_t mask;          // which of the masks is this row's; -1 is none
};

}  // namespace triptych

using namespace triptych;

namespace {

constexpr int64_t GRAIN = 1 << 14;  // logits that are worth a thread
constexpr int64_t NOT_FINITE = -1;
constexpr float ONE = 17179869184.f;  // 2^34
constexpr float NO_WEIGHT = -24.5f;   // 2^34 e^-24.5 rounds to 0
constexpr int64_t SCAN = 16 * WIDTH;  // logits that are looked at as one for the largest

// WIDTH logits in the order of ids.
inline Floats load_row(const float* from) { return load(from); }

inline Floats load_row(const Bfloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  const Bits bits = __builtin_convertvector(halves, Bits) << 16;
  Floats x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

template <class T>
inline Floats load_row(const T* from, int64_t count, float otherwise) {
  if (count >= WIDTH) return load_row(from);
  float x[WIDTH];
  for (int64_t i = 0; i < WIDTH; i++) x[i] = i < count ? to_float(from[i]) : otherwise;
  return load(x);
}

struct Largest {
  float value;
  int64_t at;  // the first place that it has
  bool is_finite;
};

template <class T>
Largest largest_of(const T* row, int64_t size) {
  Largest found = {-INFINITY, 0, true};
  Floats not_finite = {};
  for (int64_t begin = 0; begin < size; begin += SCAN) {
    const int64_t end = std::min(size, begin + SCAN);
    Floats most = broadcast(-INFINITY);
    for (int64_t i = begin; i < end; i += WIDTH) {
      const Floats x = load_row(row + i, end - i, to_float(row[begin]));
      most = x > most ? x : most;
      not_finite += x * 0.f;  // NaN of NaN and infinity
    }
    if (lanes_above(most, found.value) == 0) continue;
    found.value = largest(most);
    found.at = begin;
  }
  found.is_finite = sum(not_finite) == 0;
  while (found.is_finite && to_float(row[found.at]) != found.value) found.at++;
  return found;
}

template <class T>
void widen(const T* row, int64_t size, std::vector<float>& out) {
  for (int64_t i = 0; i < size; i += WIDTH) {
    store(out.data() + i, load_row(row + i, size - i, -INFINITY));
  }
}

// The tokens of x that a mask has, the others as minus infinity; both padded. May be in place.
//
// Bit i % 32 of word i / 32 is token i; bits behind the vocabulary have padding, minus infinity too.
Largest mask_row(const float* x, const uint32_t* words, int64_t vocabulary, float* masked) {
  Largest found = {-INFINITY, -1, true};
  const int64_t size = padded(vocabulary);
  for (int64_t begin = 0; begin < size; begin += 32) {
    const uint32_t word = words[begin / 32];
    const int64_t end = std::min(size, begin + 32);
    if (word == 0) {
      std::fill(masked + begin, masked + end, -INFINITY);
      continue;
    }
    for (int64_t i = begin; i < end; i++) {
      const float value = word >> (i - begin) & 1 ? x[i] : -INFINITY;
      masked[i] = value;
      if (value > found.value) found = {value, i, true};
    }
  }
  found.is_finite = found.at >= 0;
  return found;
}

// round(2^34 e^x) for x <= 0. In double: the float is the nearest one, but for one in 10^6.
//
//   e^x = 2^n e^r,  n = round(x / ln 2),  |r| <= ln 2 / 2,  e^r by its Taylor series to degree 11
inline HalfFloats weights_of(HalfFloats x) {
  typedef uint64_t Words __attribute__((vector_size(8 * HALF)));
  const double shift = 6755399441055744.;  // 1.5 * 2^52: adding it rounds to an integer
  const Doubles y = __builtin_convertvector(x, Doubles);
  const Doubles biased = y * 1.4426950408889634 + shift;
  const Doubles r = y - (biased - shift) * 0.6931471805599453;
  Doubles p = r * (1. / 39916800) + 1. / 3628800;
  p = p * r + 1. / 362880;
  p = p * r + 1. / 40320;
  p = p * r + 1. / 5040;
  p = p * r + 1. / 720;
  p = p * r + 1. / 120;
  p = p * r + 1. / 24;
  p = p * r + 1. / 6;
  p = p * r + 1. / 2;
  p = p * r + 1.;
  p = p * r + 1.;
  Words power;
  std::memcpy(&power, &biased, sizeof(power));
  power = (power << 52) + (uint64_t(1023 + 34) << 52);  // the integer moves to the exponent
  Doubles scale;
  std::memcpy(&scale, &power, sizeof(scale));
  const HalfFloats w = __builtin_convertvector(p * scale, HalfFloats);
  const HalfFloats whole = w < 8388608.f ? (w + 8388608.f) - 8388608.f : w;  // 2^23
  return x < NO_WEIGHT ? HalfFloats{} : whole;
}

// Weights of logits, in another place or the same; 0 below `least`.
void weigh(const float* x, int64_t size, float best, float temperature, float least,
           float* weights) {
  const Floats nothing = broadcast(-INFINITY);
  for (int64_t i = 0; i < size; i += WIDTH) {
    const Floats z = load(x + i);
    const Floats y = z < least ? nothing : (z - best) / temperature;
    store(weights + i, Floats{});
    if (lanes_above(y, NO_WEIGHT) == 0) continue;
    for (int half = 0; half < WIDTH; half += HALF) {
      HalfFloats part;
      std::memcpy(&part, reinterpret_cast<const float*>(&y) + half, sizeof(part));
      part = weights_of(part);
      std::memcpy(weights + i + half, &part, sizeof(part));
    }
  }
}

// The sum of the weights from `least` on, and that of each block.
double sum_blocks(const float* weights, int64_t size, float least, std::vector<double>& sums) {
  sums.clear();
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += BLOCK) {
    const int64_t end = std::min(size, begin + BLOCK);
    Doubles parts = {};
    for (int64_t i = begin; i < end; i += HALF) {
      HalfFloats w;
      std::memcpy(&w, weights + i, sizeof(w));
      parts += __builtin_convertvector(w < least ? HalfFloats{} : w, Doubles);
    }
    double block = 0;
    for (int lane = 0; lane < HALF; lane++) block += parts[lane];
    sums.push_back(block);
    total += block;
  }
  return total;
}

// One step of SplitMix64 (Steele, Lea, Flood 2014).
uint64_t splitmix(uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double uniform(const SampledRow& row) {
  return double(splitmix(splitmix(row.seed) ^ uint64_t(row.index)) >> 11) * 0x1p-53;
}

// The token of a row whose edited logits are x, the largest `best`; weights may be x.
int64_t draw(const float* x, int64_t vocabulary, float best, const SampledRow& row, float* weights,
             Scratch& scratch) {
  const int64_t size = padded(vocabulary);
  const bool some = row.top_k > 0 && row.top_k < vocabulary;
  const float least_logit = some ? best_at(x, size, row.top_k, scratch.keys) : -INFINITY;
  weigh(x, size, best, row.temperature, least_logit, weights);
  double total = 0;
  float least = row.min_p * ONE;
  if (row.top_p < 1) {
    total = sum_blocks(weights, size, 0, scratch.block_sums);
    const double limit = double(row.top_p) * total;
    least = std::max(least, least_in_nucleus(weights, size, limit, scratch.keys));
  }
  total = sum_blocks(weights, size, least, scratch.block_sums);
  const double level = std::floor(uniform(row) * total);
  double sum = 0;
  int64_t block = 0;
  while (sum + scratch.block_sums[block] <= level) sum += scratch.block_sums[block++];
  int64_t at = block * BLOCK;
  for (;; at++) {  // level < total: both loops end inside the row
    if (weights[at] >= least) sum += weights[at];
    if (sum > level) return at;
  }
}

struct Answers {
  int64_t num_top;
  int64_t* tokens;
  float* logprobs;  // null where no row wants any
  int64_t* top_ids;
  float* top_logprobs;

  void clear(int64_t row) const {
    if (logprobs == nullptr) return;
    logprobs[row] = NAN;
    std::fill_n(top_ids + row * num_top, num_top, 0);
    std::fill_n(top_logprobs + row * num_top, num_top, NAN);
  }
};

// Of the edited logits x, before temperature and truncation.
void write_logprobs(const float* x, int64_t size, float best, int64_t row, int64_t token,
                    const Answers& out, std::vector<uint64_t>& keys) {
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += BLOCK) {
    Floats parts = {};
    for (int64_t i = begin; i < std::min(size, begin + BLOCK); i += WIDTH) {
      parts += exp_of_negative(load(x + i) - best);
    }
    total += sum(parts);
  }
  const float log_total = float(std::log(total));
  out.logprobs[row] = (x[token] - best) - log_total;
  if (out.num_top == 0) return;
  hold_best(x, size, out.num_top, keys);
  std::sort(keys.begin(), keys.end(), std::greater<>());
  for (int64_t i = 0; i < out.num_top; i++) {
    out.top_ids[row * out.num_top + i] = place_of(keys[i]);
    out.top_logprobs[row * out.num_top + i] = (value_of(keys[i]) - best) - log_total;
  }
}

template <class T>
void sample_row(const T* logits, int64_t vocabulary, int64_t number, const SampledRow& row,
                const EditedTokens& edited, const uint32_t* masks, const Answers& out,
                Scratch& scratch) {
  out.clear(number);
  Largest most = largest_of(logits, vocabulary);
  const bool is_drawn = row.temperature > 0, wants_logprobs = row.num_logprobs >= 0;
  const bool is_changed = row.edit >= 0 || row.mask >= 0;
  out.tokens[number] = most.is_finite ? most.at : NOT_FINITE;
  if (!most.is_finite || (!is_drawn && !wants_logprobs && !is_changed)) return;
  const int64_t size = padded(vocabulary);
  scratch.logits.resize(size);
  widen(logits, vocabulary, scratch.logits);
  float* x = scratch.logits.data();
  if (row.edit >= 0) {
    edit_logits(edited, edited.edits[row.edit], vocabulary, scratch);
    most = largest_of(x, vocabulary);
    out.tokens[number] = most.is_finite ? most.at : NOT_FINITE;
    if (!most.is_finite) return;
  }
  float* weights = x;
  if (wants_logprobs) {
    scratch.weights.resize(size);
    weights = scratch.weights.data();
  }
  const float* allowed = x;
  Largest best = most;
  if (row.mask >= 0) {
    best = mask_row(x, masks + row.mask * ((vocabulary + 31) / 32), vocabulary, weights);
    out.tokens[number] = best.is_finite ? best.at : NOT_FINITE;
    if (!best.is_finite) return;
    allowed = weights;
  }
  if (is_drawn) {
    out.tokens[number] = draw(allowed, vocabulary, best.value, row, weights, scratch);
  }
  if (wants_logprobs) {
    write_logprobs(x, size, most.value, number, out.tokens[number], out, scratch.keys);
  }
}

template <class T>
void sample(const T* logits, int64_t stride, int64_t num_rows, int64_t vocabulary,
            const SampledRow* rows, const EditedTokens& edited, const uint32_t* masks,
            const Answers& out, int num_threads) {
  const SampledRow greedy = {0, 0, 0.f, 1.f, 0.f, 0, -1, -1, -1};
  const int64_t per_item = std::max<int64_t>(1, GRAIN / vocabulary);
  const int64_t num_items = (num_rows + per_item - 1) / per_item;
  parallel_for(num_threads, num_items, [&](std::ptrdiff_t item) {
    thread_local Scratch scratch;  // kept: new memory of this size costs as much as a row
    const int64_t end = std::min(num_rows, (item + 1) * per_item);
    for (int64_t i = item * per_item; i < end; i++) {
      const SampledRow& row = rows == nullptr ? greedy : rows[i];
      sample_row(logits + i * stride, vocabulary, i, row, edited, masks, out, scratch);
    }
  });
}

}  // namespace

// logits [R, V] by a stride of rows; all greedy where `rows` is null. Writes tokens [R], -1 of a row
// that is not finite, and where `logprobs` is not null, also those [R] and the best [R, num_top].
TRIPTYCH_EXPORT bool triptych_sample(const void* logits, int64_t stride, int64_t is_bf16,
                                     int64_t num_rows, int64_t vocabulary, const SampledRow* rows,
                                     const Edit* edits, const int32_t* token_ids,
                                     const int64_t* bias_ids, const float* bias_values,
                                     const uint32_t* masks, int64_t num_top, int64_t* tokens, float* logprobs,
                                     int64_t* top_ids, float* top_logprobs, int64_t num_threads) try {
  const EditedTokens edited = {edits, token_ids, bias_ids, bias_values};
  const Answers out = {num_top, tokens, logprobs, top_ids, top_logprobs};
  const int threads = int(num_threads);
  if (is_bf16) {
    sample(static_cast<const Bfloat16*>(logits), stride, num_rows, vocabulary, rows, edited, masks,
           out, threads);
  } else {
    sample(static_cast<const float*>(logits), stride, num_rows, vocabulary, rows, edited, masks,
           out, threads);
  }
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

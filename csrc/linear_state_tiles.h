// The arithmetic of the gated delta rule between two borders, for one key head at a time, in a thread's scratch.
//
// Tiles keep sums of several rows and vectors in registers. An element's sum is one chain in every tile, so the
// tile's size does not show in its bits.
#pragma once

#include "linear_state.h"
#include "vector_math.h"

namespace quire::QUIRE_ISA {
namespace {

// Vectors of a tile's width: with the rows below they fill the registers.
constexpr int kWide = QUIRE_VECTOR_BYTES == 64 ? 4 : 2;
constexpr int kTileTokens = 3;  // of two rows each

QUIRE_INLINE vf load_up_to(const float* from, int64_t count) {
  return count >= kLanes ? load(from) : load_some(from, count);
}

QUIRE_INLINE void copy_row(const float* from, int64_t count, float* to, int64_t padded) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  std::memset(to + count, 0, static_cast<std::size_t>(padded - count) * sizeof(float));
}

// `from` divided by its length, times `scale`.
QUIRE_INLINE void bring_unit(const float* from, int64_t count, float epsilon, float scale, float* to, int64_t padded) {
  copy_row(from, count, to, padded);
  vf squares = zero();
  for (int64_t k = 0; k < padded; k += kLanes) squares = fma(load(to + k), load(to + k), squares);
  const float factor = scale / __builtin_sqrtf(sum_lanes(squares) + epsilon);
  for (int64_t k = 0; k < padded; k += kLanes) store(to + k, load(to + k) * factor);
}

// -- dot products of a row with kLanes rows ------------------------------------------------------------------------

// Adds lanes kDistance apart; a's sums in the lanes without that bit, b's in those with it.
template <int kDistance, class Lanes = std::make_integer_sequence<int, kLanes>>
struct Fold;
template <int kDistance, int... kLane>
struct Fold<kDistance, std::integer_sequence<int, kLane...>> {
  static QUIRE_INLINE vf apply(vf a, vf b) {
    return __builtin_shufflevector(a, b, ((kLane & kDistance) ? kLanes + (kLane ^ kDistance) : kLane)...) +
           __builtin_shufflevector(a, b, ((kLane & kDistance) ? kLanes + kLane : kLane ^ kDistance)...);
  }
};

// sums[0]: in lane j the sum over the lanes of what sums[j] was.
template <int kDistance>
QUIRE_INLINE void fold_lanes(vf* sums) {
#pragma GCC unroll 8
  for (int j = 0; j < kDistance; ++j) sums[j] = Fold<kDistance>::apply(sums[j], sums[j + kDistance]);
  if constexpr (kDistance > 1) fold_lanes<kDistance / 2>(sums);
}

// In lane j the product of x with row j; depth: a multiple of kStateLine.
QUIRE_INLINE vf dots(const float* x, const float* rows, int64_t stride, int64_t depth) {
  vf sums[kLanes];
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) sums[j] = zero();
  for (int64_t k = 0; k < depth; k += kLanes) {
    const vf value = load(x + k);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) sums[j] = fma(value, load(rows + j * stride + k), sums[j]);
  }
  fold_lanes<kLanes / 2>(sums);
  return sums[0];
}

// -- tiles ----------------------------------------------------------------------------------------------------------

// out[r][c] = sum over k < depth of x[r][k] * matrix[k][c]. Rows of matrix and out are `stride` apart.
template <int kRows, int kVectors>
QUIRE_INLINE void product_tile(const float* x, int64_t x_stride, const float* matrix, int64_t stride, int64_t depth,
                               float* out) {
  vf sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) sums[r][c] = zero();
  for (int64_t k = 0; k < depth; ++k) {
    vf row[kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) row[c] = load(matrix + k * stride + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const vf value = broadcast(x[r * x_stride + k]);
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) sums[r][c] = fma(value, row[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) store(out + r * stride + c * kLanes, sums[r][c]);
}

// to[k][c] = left * state[k][c] + sum over i < kBorder of keys[i][k] * updates[i][c], for kRows successive k. Rows of
// all but keys are `stride` apart. state: null: zeros; may be `to`.
template <int kRows, int kVectors>
QUIRE_INLINE void border_tile(const float* state, float left, const float* keys, int64_t key_stride,
                              const float* updates, int64_t stride, float* to) {
  vf sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c)
      sums[r][c] = state == nullptr ? zero() : load(state + r * stride + c * kLanes) * left;
  for (int64_t i = 0; i < kBorder; ++i) {
    vf row[kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) row[c] = load(updates + i * stride + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const vf value = broadcast(keys[i * key_stride + r]);
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) sums[r][c] = fma(value, row[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) store(to + r * stride + c * kLanes, sums[r][c]);
}

// Calls tile(first column, vectors) for all columns of a row of `width` elements, a multiple of kStateLine.
template <int kMost, class Tile>
QUIRE_INLINE void by_columns(int64_t width, Tile tile) {
  int64_t c = 0;
  for (; c + kMost * kLanes <= width; c += kMost * kLanes) tile(c, std::integral_constant<int, kMost>());
  for (; c < width; c += kLanes) tile(c, std::integral_constant<int, 1>());
}

// Calls tile(first row, rows) for `count` rows: kMost at a time, then one by one.
template <int kMost, class Tile>
QUIRE_INLINE void by_rows(int64_t count, Tile tile) {
  int64_t r = 0;
  for (; r + kMost <= count; r += kMost) tile(r, std::integral_constant<int, kMost>());
  for (; r < count; ++r) tile(r, std::integral_constant<int, 1>());
}

// The tokens between two borders, of one key head and one of its value heads at a time. Tokens are numbered from the
// border on; `begin` and `end` say which of them the step computes, and all before `begin` are brought from a page.
class DeltaFrame {
 public:
  DeltaFrame(std::byte* scratch, int64_t key, int64_t value) : key_(key), value_(value) {
    float* at = reinterpret_cast<float*>(scratch);
    const auto take = [&at](int64_t count) {
      float* part = at;
      at += count;
      return part;
    };
    pairs_ = take(kBorder * 2 * key);
    scaled_ = take(kBorder * key);
    updates_ = take(kBorder * value);
    projected_ = take(kBorder * 2 * value);
    dots_ = take(kBorder * 2 * kBorder);
    weights_ = take(kBorder * 2 * kBorder);
    for (float** row : {&betas_, &decays_, &sums_, &powers_}) *row = take(kBorder + kStateLine);
  }

  float* key(int64_t n) const { return pairs_ + 2 * n * key_; }
  float* query(int64_t n) const { return key(n) + key_; }
  float* update(int64_t n) const { return updates_ + n * value_; }  // before `update_rows`: the token's value
  float* result(int64_t n) const { return projected_ + (2 * n + 1) * value_; }
  float* betas() const { return betas_; }
  float* decays() const { return decays_; }

  // Products of the step's keys and queries with all keys up to their own.
  void multiply_keys(int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t i = 0; i <= n; i += kLanes) {
        store(dots_ + 2 * n * kBorder + i, dots(key(n), key(i), 2 * key_, key_));
        store(dots_ + (2 * n + 1) * kBorder + i, dots(query(n), key(i), 2 * key_, key_));
      }
  }

  // betas: of gates, their sigmoids. decays: of gates with their bias, minus_rate * softplus. And the running sums.
  void open_gates(int64_t begin, int64_t end, float minus_rate) {
    for (int64_t n = begin; n < end; n += kLanes) {
      store(betas_ + n, sigmoid(load(betas_ + n)));
      store(decays_ + n, softplus(load(decays_ + n)) * minus_rate);
    }
    float sum = 0;
    for (int64_t n = 0; n < end; ++n) sums_[n] = sum += decays_[n];
    for (int64_t n = begin; n < end; n += kLanes) store(powers_ + n, exp(load(sums_ + n)));
  }

  // The products of keys, times what is left of an earlier token at a later one.
  void weigh(int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t i = 0; i <= n; i += kLanes) {
        const vf left = exp(sums_[n] - load(sums_ + i));
        for (int64_t row = 2 * n; row < 2 * n + 2; ++row)
          store(weights_ + row * kBorder + i, load(dots_ + row * kBorder + i) * left);
      }
  }

  // Keys and queries times the state at the border: [key_dim][value], or null for zeros.
  void multiply_state(const float* state, int64_t key_dim, int64_t begin, int64_t end) {
    float* out = projected_ + 2 * begin * value_;
    const int64_t rows = 2 * (end - begin);
    if (state == nullptr) {
      std::memset(out, 0, static_cast<std::size_t>(rows * value_) * sizeof(float));
      return;
    }
    const auto tile = [&](auto tile_rows, auto vectors, int64_t r, int64_t c) {
      product_tile<tile_rows.value, vectors.value>(key(begin) + r * key_, key_, state + c, value_, key_dim,
                                                   out + r * value_ + c);
    };
    if (rows == 2) {  // the state is read row by row
      by_columns<2 * kWide>(value_, [&](int64_t c, auto vectors) {
        tile(std::integral_constant<int, 2>(), vectors, 0, c);
      });
      return;
    }
    by_columns<kWide>(value_, [&](int64_t c, auto vectors) {
      by_rows<2 * kTileTokens>(rows, [&](int64_t r, auto tile_rows) { tile(tile_rows, vectors, r, c); });
    });
  }

  // The step's tokens' updates, one after the other, and their results.
  void update_rows(int64_t begin, int64_t end) {
    by_columns<kWide>(value_, [&](int64_t c, auto vectors) {
      by_rows<kTileTokens>(end - begin, [&](int64_t r, auto tokens) {
        token_tile<tokens.value, vectors.value>(begin + r, c);
      });
    });
  }

  // Writes the state at the next border; `to` may be `state`.
  void pass_border(const float* state, int64_t key_dim, float* to) {
    for (int64_t i = 0; i < kBorder; i += kLanes) store(betas_ + i, exp(sums_[kBorder - 1] - load(sums_ + i)));
    for (int64_t i = 0; i < kBorder; ++i)
      for (int64_t k = 0; k < key_; k += kLanes) store(scaled_ + i * key_ + k, load(key(i) + k) * betas_[i]);
    const float left = powers_[kBorder - 1];
    by_columns<kWide>(value_, [&](int64_t c, auto vectors) {
      by_rows<2 * kTileTokens>(key_dim, [&](int64_t k, auto rows) {
        const int64_t at = k * value_ + c;
        border_tile<rows.value, vectors.value>(state == nullptr ? nullptr : state + at, left, scaled_ + k, key_,
                                               updates_ + c, value_, to + at);
      });
    });
  }

 private:
  float weight(int64_t row, int64_t i) const { return weights_[row * kBorder + i]; }

  template <int kTokens, int kVectors>
  QUIRE_INLINE void token_tile(int64_t first, int64_t c) {
    vf changes[kTokens][kVectors], results[kTokens][kVectors];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) changes[t][v] = results[t][v] = zero();
    const float* weights = weights_ + 2 * first * kBorder;
    for (int64_t i = 0; i < first; ++i) {
      vf row[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) row[v] = load(update(i) + c + v * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const vf own = broadcast(weights[2 * t * kBorder + i]), read = broadcast(weights[(2 * t + 1) * kBorder + i]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          changes[t][v] = fma(own, row[v], changes[t][v]);
          results[t][v] = fma(read, row[v], results[t][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const int64_t n = first + t;
      const vf power = broadcast(powers_[n]), beta = broadcast(betas_[n]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = c + v * kLanes;
        const vf seen = load(projected_ + 2 * n * value_ + at);
        const vf change = (fma(-power, seen, load(update(n) + at)) - changes[t][v]) * beta;
        store(update(n) + at, change);
#pragma GCC unroll 8
        for (int later = t + 1; later < kTokens; ++later)
          changes[later][v] = fma(broadcast(weight(2 * (first + later), n)), change, changes[later][v]);
#pragma GCC unroll 8
        for (int later = t; later < kTokens; ++later)
          results[later][v] = fma(broadcast(weight(2 * (first + later) + 1, n)), change, results[later][v]);
        store(result(n) + at, fma(power, load(result(n) + at), results[t][v]));
      }
    }
  }

  const int64_t key_, value_;  // elements of a row
  float* pairs_;               // [kBorder][2][key]: each token's key and query
  float* scaled_;              // [kBorder][key]
  float* updates_;             // [kBorder][value]
  float* projected_;           // [kBorder][2][value]: the state times the key, and the result
  float* dots_;                // [kBorder][2][kBorder]
  float* weights_;             // the same, times what is left
  float *betas_, *decays_, *sums_, *powers_;  // [kBorder]
};

}  // namespace
}  // namespace quire::QUIRE_ISA

// LightNL in one pass over a map with channels last, of any number of channels:
//
//     z = DepthwiseConv3x3(x_c x_sc^T x_s / (H W)) + bias + x, + shortcut where there is one
//
// x_c: the first `compact` channels, x_s: every stride-th position, as in autonl.nn.light_nonlocal; BN is in the depthwise
// kernel. The product is made row by row and taken up by the kernel while it is in the cache. Standard C++ and the vectors
// of GCC and Clang; one thread.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace autonl {
namespace {  // every library has its own, whatever others a process has loaded

struct Map {
  std::ptrdiff_t height, width, channels;
  std::ptrdiff_t compact, stride;
  float energy_eps;  // LightNL is divided by its energy and this; 0: LightNL as published
};

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int HALF = LANES / 2;
constexpr std::ptrdiff_t LINE = 16;  // floats of a cache line: what memory is aligned to

template <int L>
struct Lanes {
  typedef float Vector __attribute__((vector_size(4 * L), aligned(4), may_alias));
};
template <int L>
using Vector = typename Lanes<L>::Vector;

template <int L>
inline Vector<L> load(const float* from) {
  return *reinterpret_cast<const Vector<L>*>(from);
}

template <int L>
inline void store(float* to, Vector<L> value) {
  *reinterpret_cast<Vector<L>*>(to) = value;
}

// A matrix in memory: element (m, k) lies at data[m * row + k * column].
struct Matrix {
  const float* data;
  std::ptrdiff_t row, column;
};

// out = a b, or out += a b where `add`, of M rows and V vectors: a (M, K), b (K, V L). Columns of b and out are neighbours.
template <int L, int M, int V>
inline void tile(Matrix a, Matrix b, float* out, std::ptrdiff_t out_row, std::ptrdiff_t K, bool add) {
  Vector<L> sums[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sums[m][v] = add ? load<L>(out + m * out_row + v * L) : Vector<L>{};
  for (std::ptrdiff_t k = 0; k < K; ++k) {
    Vector<L> factors[V];
    for (int v = 0; v < V; ++v) factors[v] = load<L>(b.data + k * b.row + v * L);
    for (int m = 0; m < M; ++m) {
      const float factor = a.data[m * a.row + k * a.column];
      for (int v = 0; v < V; ++v) sums[m][v] += factor * factors[v];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store<L>(out + m * out_row + v * L, sums[m][v]);
}

// The same for M rows, MOST at once and the rest in halves of it.
template <int L, int MOST, int V>
inline void strip(Matrix a, Matrix b, float* out, std::ptrdiff_t out_row, std::ptrdiff_t M, std::ptrdiff_t K, bool add) {
  std::ptrdiff_t m = 0;
  for (; m + MOST <= M; m += MOST)
    tile<L, MOST, V>({a.data + m * a.row, a.row, a.column}, b, out + m * out_row, out_row, K, add);
  if constexpr (MOST > 1)
    strip<L, MOST / 2, V>({a.data + m * a.row, a.row, a.column}, b, out + m * out_row, out_row, M - m, K, add);
}

// out (M, N) = a (M, K) b (K, N), or += where `add`.
inline void product(
    Matrix a, Matrix b, float* out, std::ptrdiff_t out_row, std::ptrdiff_t M, std::ptrdiff_t N, std::ptrdiff_t K,
    bool add) {
  std::ptrdiff_t n = 0;
  const auto at = [&](std::ptrdiff_t column) { return Matrix{b.data + column, b.row, 1}; };
  for (; n + 4 * LANES <= N; n += 4 * LANES) strip<LANES, 4, 4>(a, at(n), out + n, out_row, M, K, add);
  for (; n + 2 * LANES <= N; n += 2 * LANES) strip<LANES, 6, 2>(a, at(n), out + n, out_row, M, K, add);
  for (; n + LANES <= N; n += LANES) strip<LANES, 8, 1>(a, at(n), out + n, out_row, M, K, add);
  for (; n + HALF <= N; n += HALF) strip<HALF, 8, 1>(a, at(n), out + n, out_row, M, K, add);
  for (; n < N; ++n) strip<1, 8, 1>(a, at(n), out + n, out_row, M, K, add);
}

// One row of z, channels from `first` on in whole vectors of L; the first channel that is left.
//
// y: the rows above, of and below this one, with a column of zeros before and behind (W + 2, C)
template <int L>
inline std::ptrdiff_t depthwise_row(
    std::ptrdiff_t first, const Map& map, const float* const y[3], const float* x, const float* shortcut,
    const float* taps, const float* bias, float* z) {
  const std::ptrdiff_t C = map.channels;
  for (; first + L <= C; first += L) {
    Vector<L> kernel[9];
    for (int tap = 0; tap < 9; ++tap) kernel[tap] = load<L>(taps + tap * C + first);
    const Vector<L> level = load<L>(bias + first);
    for (std::ptrdiff_t w = 0; w < map.width; ++w) {
      const std::ptrdiff_t here = w * C + first;
      Vector<L> sums[3] = {load<L>(x + here) + level, Vector<L>{}, Vector<L>{}};  // three: a sum waits for its last term
      if (shortcut) sums[1] = load<L>(shortcut + here);
      for (int row = 0; row < 3; ++row)
        for (int column = 0; column < 3; ++column)
          sums[row] += kernel[3 * row + column] * load<L>(y[row] + here + column * C);
      store<L>(z + here, sums[0] + (sums[1] + sums[2]));
    }
  }
  return first;
}

inline std::ptrdiff_t whole_lines(std::ptrdiff_t floats) { return (floats + LINE - 1) / LINE * LINE; }

// Whether (x_c x_sc^T) x_s has fewer multiply-adds than x_c (x_sc^T x_s).
inline bool is_spatial(const Map& map) {
  const std::ptrdiff_t positions = map.height * map.width, both = map.compact + map.channels;
  const std::ptrdiff_t samples = ((map.height + map.stride - 1) / map.stride) * ((map.width + map.stride - 1) / map.stride);
  return positions * samples * both < (samples + positions) * map.compact * map.channels;
}

// What is wrong with the sizes of an operator's tensors; null where nothing is.
//
// map: with the height and width that the operator was made for
inline const char* problem(
    const Map& map, std::ptrdiff_t height, std::ptrdiff_t width, std::ptrdiff_t taps, std::ptrdiff_t bias) {
  if (height < 1 || width < 1 || map.channels < 1) return "LightNL: x is not (N, H, W, C)";
  if (height != map.height || width != map.width) return "LightNL: x has another size than the network was exported for";
  if (map.compact < 1 || map.compact > map.channels) return "LightNL: compact is not between 1 and the channels";
  if (map.stride < 1) return "LightNL: stride is not positive";
  if (taps != 9 * map.channels || bias != map.channels) return "LightNL: taps are not (9, C), or bias is not (C)";
  return nullptr;
}

// z (H, W, C) of x (H, W, C). taps (9, C), bias (C); shortcut (H, W, C) or null.
inline void lightnl(
    const float* x, const float* taps, const float* bias, const float* shortcut, float* z, const Map& map) {
  const std::ptrdiff_t H = map.height, W = map.width, C = map.channels, R = map.compact, step = map.stride;
  const std::ptrdiff_t sampled_width = (W + step - 1) / step, S = (H + step - 1) / step * sampled_width;
  const bool spatial = is_spatial(map);
  const std::ptrdiff_t row = W * C, line = whole_lines((W + 2) * C);
  const std::ptrdiff_t columns = whole_lines(S);  // of the affinity, those beyond S are zero
  const std::ptrdiff_t copied = spatial && step > 1 ? whole_lines(S * C) : 0;
  const std::ptrdiff_t factors = spatial ? R * columns : whole_lines(R * C);
  static thread_local std::vector<float> memory;
  memory.resize(LINE + copied + factors + (spatial ? W * columns : 0) + 4 * line);
  float* start = memory.data();
  while (reinterpret_cast<std::uintptr_t>(start) % (4 * LINE)) ++start;

  const float* samples = step > 1 ? start : x;  // (S, C): x_s, used where spatial
  float* factor = start + copied;               // (R, C): x_sc^T x_s, or where spatial (R, columns): x_sc^T
  float* affinity = factor + factors;           // (W, columns): a row's x_c x_sc^T, used where spatial
  float square = 0.0f;                          // |x_sc|^2
  if (spatial) {
    std::fill(factor, factor + factors, 0.0f);
    std::ptrdiff_t sample = 0;
    for (std::ptrdiff_t h = 0; h < H; h += step)
      for (std::ptrdiff_t w = 0; w < W; w += step, ++sample) {
        const float* position = x + h * row + w * C;
        if (copied) std::memcpy(start + sample * C, position, sizeof(float) * C);
        for (std::ptrdiff_t r = 0; r < R; ++r) {
          factor[r * columns + sample] = position[r];
          square += position[r] * position[r];
        }
      }
  } else {
    for (std::ptrdiff_t h = 0; h < H; h += step) {
      const float* positions = x + h * row;
      product({positions, 1, step * C}, {positions, step * C, 1}, factor, C, R, C, sampled_width, h > 0);
    }
    for (std::ptrdiff_t r = 0; r < R; ++r) square += factor[r * C + r];
  }
  float share = 1.0f / float(H * W);
  if (map.energy_eps > 0.0f) share /= square / float(R * H * W) + map.energy_eps;
  for (std::ptrdiff_t i = 0; i < factors; ++i) factor[i] *= share;

  float* y[3];  // rows of x_c x_sc^T x_s, each made over the one three above it
  float* outside = affinity + (spatial ? W * columns : 0);  // above the first and below the last
  std::fill(outside, outside + line, 0.0f);
  for (int i = 0; i < 3; ++i) {
    y[i] = outside + (i + 1) * line;
    std::fill(y[i], y[i] + C, 0.0f);  // before the first column and behind the last
    std::fill(y[i] + C + row, y[i] + line, 0.0f);
  }
  const auto make = [&](std::ptrdiff_t h) {
    const Matrix compact = {x + h * row, C, 1};
    float* out = y[h % 3] + C;
    if (spatial) {
      product(compact, {factor, columns, 1}, affinity, columns, W, columns, R, false);
      product({affinity, columns, 1}, {samples, C, 1}, out, C, W, C, S, false);
    } else {
      product(compact, {factor, C, 1}, out, C, W, C, R, false);
    }
  };
  make(0);
  for (std::ptrdiff_t h = 0; h < H; ++h) {
    if (h + 1 < H) make(h + 1);
    const float* near[3] = {h ? y[(h + 2) % 3] : outside, y[h % 3], h + 1 < H ? y[(h + 1) % 3] : outside};
    const float* added = shortcut ? shortcut + h * row : nullptr;
    std::ptrdiff_t done = depthwise_row<LANES>(0, map, near, x + h * row, added, taps, bias, z + h * row);
    done = depthwise_row<HALF>(done, map, near, x + h * row, added, taps, bias, z + h * row);
    depthwise_row<1>(done, map, near, x + h * row, added, taps, bias, z + h * row);
  }
}

}  // namespace
}  // namespace autonl

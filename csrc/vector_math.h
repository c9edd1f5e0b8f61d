// exp, tanh, erf and what is made of them, on vectors. Each lane is computed by the same operations whatever its place.
#pragma once

#include "simd.h"

namespace quire::QUIRE_ISA {

// e^x: within 2 ulp on [-87.3, 88.7]; 0 below -87.33 (no subnormal results), infinity above 88.72, NaN for NaN.
QUIRE_INLINE vf exp(vf x) {
  const vf log2e = broadcast(1.44269504088896341f);
  const vf ln2_high = broadcast(0.693359375f), ln2_low = broadcast(-2.12194440e-4f);
  const vf highest = broadcast(89.0f), lowest = broadcast(-87.3365479f);
  vf bounded = max(lowest, min(highest, x));  // NaN stays NaN
  // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
  const vf magic = broadcast(12582912.0f);
  vf shifted = fma(bounded, log2e, magic);
  vf n = shifted - magic;
  vf r = fma(n, -ln2_high, bounded);
  r = fma(n, -ln2_low, r);
  vf p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)lowest, _CMP_NLT_UQ), (__m512)p, (__m512)n);
#else
  // 2^n in two factors: n reaches 128.
  vi whole = bit_cast<vi>(shifted) - bit_cast<vi>(magic);
  vi half = whole >> 1;
  vf result = p * bit_cast<vf>((half + 127) << 23) * bit_cast<vf>((whole - half + 127) << 23);
  return x < lowest ? vf{} : result;
#endif
}

QUIRE_INLINE vf abs(vf x) { return bit_cast<vf>(bit_cast<vi>(x) & 0x7fffffff); }

// `magnitude` with the sign of `sign`.
QUIRE_INLINE vf with_sign(vf magnitude, vf sign) {
  return bit_cast<vf>((bit_cast<vi>(magnitude) & 0x7fffffff) | (bit_cast<vi>(sign) & static_cast<int32_t>(0x80000000u)));
}

// Hyperbolic tangent, within 2e-7.
QUIRE_INLINE vf tanh(vf x) {
  vf t = exp(abs(x) * -2.0f);
  return with_sign((1.0f - t) / (1.0f + t), x);
}

// Error function, within 2e-7: 1 - t p(t) exp(-x^2) with t = 1 / (1 + 0.4 |x|), p fitted on [0, 4].
QUIRE_INLINE vf erf(vf x) {
  vf size = abs(x);
  vf t = 1.0f / fma(size, broadcast(0.4f), broadcast(1.0f));
  vf p = broadcast(3.029591128e-02f);
  p = fma(p, t, broadcast(-3.498481505e-01f));
  p = fma(p, t, broadcast(1.015187865e+00f));
  p = fma(p, t, broadcast(-7.029038141e-01f));
  p = fma(p, t, broadcast(6.696382755e-01f));
  p = fma(p, t, broadcast(9.709453816e-02f));
  p = fma(p, t, broadcast(2.405353668e-01f));
  return with_sign(1.0f - p * t * exp(size * -size), x);
}

QUIRE_INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

// log(1 + e^x), within 2e-7 of the larger of it and e^x: max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) twice the
// inverse hyperbolic tangent of t / (2 + t), by its series.
QUIRE_INLINE vf softplus(vf x) {
  const vf t = exp(-abs(x)), s = t / (t + 2.0f), square = s * s;
  vf p = broadcast(1.0f / 15);
  p = fma(p, square, broadcast(1.0f / 13));
  p = fma(p, square, broadcast(1.0f / 11));
  p = fma(p, square, broadcast(1.0f / 9));
  p = fma(p, square, broadcast(1.0f / 7));
  p = fma(p, square, broadcast(1.0f / 5));
  p = fma(p, square, broadcast(1.0f / 3));
  p = fma(p, square, broadcast(1.0f));
  return max(x, vf{}) + s * 2.0f * p;
}

}  // namespace quire::QUIRE_ISA

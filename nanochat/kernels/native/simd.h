/* Sixteen numbers at a time, in the vector types of GCC and Clang, which every processor has in some way. */
#ifndef NANOCHAT_SIMD_H
#define NANOCHAT_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "op.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef int8_t vb __attribute__((vector_size(16)));

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
#if defined(__AVX2__) && !defined(__AVX512F__)
/* Eights by name, where GCC makes of sixteens what goes through memory. */
typedef struct Eights {
    __m256 low, high;
} Eights;
INLINE Eights eights_of(vf x) {
    Eights h;
    memcpy(&h, &x, sizeof h);
    return h;
}
INLINE vf whole(__m256 low, __m256 high) {
    const Eights h = {low, high};
    vf x;
    memcpy(&x, &h, sizeof x);
    return x;
}
INLINE vf smaller(vf a, vf b) {
    const Eights p = eights_of(a), q = eights_of(b);
    return whole(_mm256_min_ps(p.low, q.low), _mm256_min_ps(p.high, q.high));
}
INLINE vf larger(vf a, vf b) {
    const Eights p = eights_of(a), q = eights_of(b);
    return whole(_mm256_max_ps(p.low, q.low), _mm256_max_ps(p.high, q.high));
}
#elif defined(__AVX512F__)
INLINE vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
#endif
INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE float sum(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
#endif
}

/* The sums of sixteen vectors. */
INLINE vf sums_of(const vf *x) {
#ifdef __AVX512F__
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; i++)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps((__m512)x[2 * i], (__m512)x[2 * i + 1]),
                                 _mm512_unpackhi_ps((__m512)x[2 * i], (__m512)x[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++)
        pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88),
                             _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xdd));
#elif defined(__AVX2__)
    __m256 folded[16];
    for (int i = 0; i < 16; i++) {
        const Eights h = eights_of(x[i]);
        folded[i] = _mm256_add_ps(h.low, h.high);
    }
    __m128 fours[4];
    for (int i = 0; i < 4; i++) {
        const __m256 *e = folded + 4 * i;
        const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(e[0], e[1]), _mm256_hadd_ps(e[2], e[3]));
        fours[i] = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    }
    return whole(_mm256_set_m128(fours[1], fours[0]), _mm256_set_m128(fours[3], fours[2]));
#else
    float y[LANES];
    for (int i = 0; i < LANES; i++) y[i] = sum(x[i]);
    vf all;
    memcpy(&all, y, sizeof all);
    return all;
#endif
}

INLINE float largest(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
    return a[0];
#endif
}

INLINE vf load_floats(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Numbers i .. i + 15 of an array of `type`, which is a constant wherever speed matters. */
INLINE vf load(const void *p, int type, int64_t i) {
    if (type == FLOAT32) return load_floats((const float *)p + i);
    if (type == BFLOAT16) {
        vh h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        return (vf)(__builtin_convertvector(h, vu) << 16);
    }
    vb b;
    memcpy(&b, (const int8_t *)p + i, sizeof b);
#if defined(__AVX512F__)
    /* By hand, because GCC 12 converts the bytes one at a time. */
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b));
#elif defined(__AVX2__)
    return whole(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)b)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)b, 8))));
#else
    return __builtin_convertvector(b, vf);
#endif
}

INLINE void store(void *p, int type, int64_t i, vf x) {
    if (type == FLOAT32) {
        memcpy((float *)p + i, &x, sizeof x);
        return;
    }
    vu bits = (vu)x;
    vu rounded = bits + 0x7fff + ((bits >> 16) & 1); /* to nearest, ties to even */
    vi is_nan = (vi)((bits & 0x7fffffff) > 0x7f800000);
    vu narrow = (((vu)is_nan & 0x7fc00000u) | (~(vu)is_nan & rounded)) >> 16;
    vh h = __builtin_convertvector(narrow, vh);
    memcpy((uint16_t *)p + i, &h, sizeof h);
}

INLINE float load_one(const void *p, int type, int64_t i) {
    if (type == FLOAT32) return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE void store_one(void *p, int type, int64_t i, float x) {
    if (type == FLOAT32) {
        ((float *)p)[i] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    ((uint16_t *)p)[i] = (uint16_t)(((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000u : rounded) >> 16);
}

/* Whole numbers, ties to even; for magnitudes below 2^22. */
INLINE vf nearest(vf x) { return (x + 12582912.0f) - 12582912.0f; }

/* e^x within 2 units in the last place; 0 below -87.3, NaN of NaN. The polynomial is that of Cephes' expf. */
INLINE vf exponential(vf x) {
    x = smaller(splat(88.3f), x); /* of a NaN and a number, the second */
    vi vanishes = x < -87.3f, is_number = x == x;
    x = larger(splat(-87.3f), x);
    vf shifted = x * 1.44269504f + 12582912.0f;
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi power = ((vi)shifted - 0x4b400000) << 23;
    return choose(vanishes, (vf){0}, choose(is_number, (vf)((vi)p + power), x));
}

INLINE vf hyperbolic_tangent(vf x) {
    vf e = exponential(2.0f * larger(smaller(x, splat(15.0f)), splat(-15.0f)));
    return (e - 1.0f) / (e + 1.0f);
}

INLINE float half_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float x;
    memcpy(&x, &bits, 4);
    return x * 5.192296858534828e33f; /* 2^112: the exponents' offsets differ by as much */
}

/* The nearest float16, ties to even, of 0 <= x <= 65504. */
INLINE uint16_t float_to_half(float x) {
    uint32_t bits;
    if (x < 6.103515625e-05f) { /* 0.5's neighbours are as far apart as the smallest float16 is from 0 */
        x += 0.5f;
        memcpy(&bits, &x, 4);
        return (uint16_t)(bits - 0x3f000000);
    }
    memcpy(&bits, &x, 4);
    bits += 0xfff + ((bits >> 13) & 1);
    return (uint16_t)((bits - (112u << 23)) >> 13);
}

#endif

/* Linear maps; units of work are panels of 16 outputs.
 *
 * Weights of 4 and 8 bits lie panel after panel, in each the groups of 32 along k, one after the other:
 *   4 bits: 256 bytes of levels, byte 64 j + 4 i + b having those of output i at k = 4 j + b (low half) and
 *           16 + 4 j + b (high half); then 16 pairs of bfloat16, scale and zero.
 *   8 bits: 512 bytes of value + 128, byte 64 j + 4 i + b being that of output i at k = 4 j + b. A float scale
 *           for each output lies elsewhere.
 * So one instruction multiplies four numbers of a row by those of sixteen outputs, and rows share the unpacking.
 */

enum { INT4_BYTES = 256 + 64, INT8_BYTES = 512 };

#if defined(__AVX512VNNI__)
enum { ROWS_AT_ONCE = 8, IS_OFFSET = 1 };

/* acc[i] + sum over four bytes of w (unsigned) times x's. */
INLINE vi dot(vi acc, vu w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
}
INLINE vi dot_wide(vi acc, vu w, const int8_t *x) { return dot(acc, w, x); }

#elif defined(__AVX2__)
enum { ROWS_AT_ONCE = 4, IS_OFFSET = 0 };

typedef union Halves {
    vi all;
    __m256i half[2];
} Halves;

INLINE vi dot(vi acc, vu w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    Halves a = {acc}, b = {(vi)w};
    const __m256i s = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < 2; i++) /* of at most 15 and 127, so that pairs fit 16 bits */
        a.half[i] = _mm256_add_epi32(a.half[i], _mm256_madd_epi16(_mm256_maddubs_epi16(b.half[i], s), ones));
    return a.all;
}

/* Of 8-bit weights, whose pairs would not fit 16 bits as unsigned numbers: as signed ones they do. */
INLINE vi dot_wide(vi acc, vu w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    Halves a = {acc}, b = {(vi)(w ^ 0x80808080u)};
    const __m256i s = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < 2; i++) {
        __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(b.half[i]), _mm256_sign_epi8(s, b.half[i]));
        a.half[i] = _mm256_add_epi32(a.half[i], _mm256_madd_epi16(products, ones));
    }
    return a.all;
}

#else
enum { ROWS_AT_ONCE = 2, IS_OFFSET = 1 };

INLINE vi dot(vi acc, vu w, const int8_t *x) {
    acc += __builtin_convertvector(w & 255, vi) * x[0];
    acc += __builtin_convertvector((w >> 8) & 255, vi) * x[1];
    acc += __builtin_convertvector((w >> 16) & 255, vi) * x[2];
    return acc + __builtin_convertvector(w >> 24, vi) * x[3];
}
INLINE vi dot_wide(vi acc, vu w, const int8_t *x) { return dot(acc, w, x); }
#endif

INLINE vu load_bits(const uint8_t *p) {
    vu x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* A group's levels of 4 bits times as many numbers; the sums are two, so that none waits for the one before. */
INLINE vi dot_levels(const vu *quads, const int8_t *x) {
    vi even = {0}, odd = {0};
    for (int j = 0; j < 8; j += 2) {
        even = dot(even, quads[j], x + 4 * j);
        odd = dot(odd, quads[j + 1], x + 4 * j + 4);
    }
    return even + odd;
}

INLINE void finish_panel(const Op *op, int64_t row, int64_t panel, vf y) {
    const int64_t first = panel * PANEL, at = row * op->n + first;
    if (first + PANEL <= op->n) {
        if (op->bias) y += load(op->bias, op->w_type, first);
        store(op->y, op->y_type, at, y);
        return;
    }
    float numbers[PANEL];
    memcpy(numbers, &y, sizeof numbers);
    for (int64_t i = 0; first + i < op->n; i++)
        store_one(op->y, op->y_type, at + i,
                  numbers[i] + (op->bias ? load_one(op->bias, op->w_type, first + i) : 0.0f));
}

/* One panel for `count` rows, a constant, from row t on. */
INLINE void panel_int4(const Op *op, int64_t panel, int64_t t, int count) {
    const int64_t k = op->inner, groups = k / GROUP, row_bytes = quantized_row_bytes(k);
    const uint8_t *w = (const uint8_t *)op->w + panel * groups * INT4_BYTES;
    const int8_t *x = (const int8_t *)op->x + t * row_bytes;
    vf acc[ROWS_AT_ONCE] = {{0}};
    for (int64_t g = 0; g < groups; g++, w += INT4_BYTES) {
        vu quads[8];
        for (int j = 0; j < 4; j++) {
            vu both = load_bits(w + 64 * j);
            quads[j] = both & 0x0f0f0f0fu, quads[j + 4] = (both >> 4) & 0x0f0f0f0fu;
        }
        const vu pairs = load_bits(w + 256);
        const vf scale = (vf)(pairs << 16), lowest = (vf)(pairs & 0xffff0000u) - 8.0f * scale;
        for (int r = 0; r < count; r++) {
            const int8_t *row = x + r * row_bytes;
            const float *scales = (const float *)(row + k);
            acc[r] += __builtin_convertvector(dot_levels(quads, row + g * GROUP), vf) * scale * scales[g];
            acc[r] += lowest * scales[groups + g];
        }
    }
    for (int r = 0; r < count; r++) finish_panel(op, t + r, panel, acc[r]);
}

/* acc + group g of a row of k numbers times the group's values + 128. */
INLINE vf add_int8_group(vf acc, const vu *quads, const int8_t *row, int64_t k, int64_t g) {
    const float *scales = (const float *)(row + k);
    const int32_t *offsets = (const int32_t *)(scales + 2 * (k / GROUP));
    vi even = (vi){0} + (IS_OFFSET ? offsets[g] : 0), odd = {0};
    for (int j = 0; j < 8; j += 2) {
        even = dot_wide(even, quads[j], row + g * GROUP + 4 * j);
        odd = dot_wide(odd, quads[j + 1], row + g * GROUP + 4 * j + 4);
    }
    return acc + __builtin_convertvector(even + odd, vf) * scales[g];
}

INLINE void panel_int8(const Op *op, int64_t panel, int64_t t, int count) {
    const int64_t k = op->inner, groups = k / GROUP, row_bytes = quantized_row_bytes(k);
    const uint8_t *w = (const uint8_t *)op->w + panel * groups * INT8_BYTES;
    const int8_t *x = (const int8_t *)op->x + t * row_bytes;
    vf acc[ROWS_AT_ONCE] = {{0}};
    for (int64_t g = 0; g < groups; g++, w += INT8_BYTES) {
        vu quads[8];
        for (int j = 0; j < 8; j++) quads[j] = load_bits(w + 64 * j);
        for (int r = 0; r < count; r++) acc[r] = add_int8_group(acc[r], quads, x + r * row_bytes, k, g);
    }
    const vf scale = load_floats((const float *)op->w_scales + panel * PANEL);
    for (int r = 0; r < count; r++) finish_panel(op, t + r, panel, acc[r] * scale);
}

/* Rows from `t` on. */
#define FOR_ROWS(PANEL_OF, op, panel, t)                                                             \
    {                                                                                                \
        const int64_t rows = *(op)->rows;                                                            \
        int64_t row = t;                                                                             \
        for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE) PANEL_OF(op, panel, row, ROWS_AT_ONCE); \
        for (; row + 2 <= rows; row += 2) PANEL_OF(op, panel, row, 2);                               \
        for (; row < rows; row++) PANEL_OF(op, panel, row, 1);                                       \
    }

static void run_linear_int4(const Op *op, int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; panel++) FOR_ROWS(panel_int4, op, panel, 0)
}

static void run_linear_int8(const Op *op, int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; panel++) FOR_ROWS(panel_int8, op, panel, 0)
}

enum { OUTPUTS_AT_ONCE = 4, FLOAT_ROWS_AT_ONCE = 4 };

/* `count` rows from row t on and `outputs` outputs from n on, both constants. */
INLINE void products(const Op *op, int64_t n, int64_t t, int outputs, int count, int type) {
    const int64_t k = op->inner;
    vf acc[OUTPUTS_AT_ONCE][FLOAT_ROWS_AT_ONCE] = {{{0}}};
#ifdef __AVX512BF16__
    if (type == BFLOAT16) {
        for (int64_t i = 0; i < k; i += 2 * LANES) {
            __m512i x[FLOAT_ROWS_AT_ONCE];
            for (int r = 0; r < count; r++)
                x[r] = _mm512_loadu_si512((const uint16_t *)op->x + (t + r) * op->x_stride + i);
            for (int o = 0; o < outputs; o++) {
                __m512bh w = (__m512bh)_mm512_loadu_si512((const uint16_t *)op->w + (n + o) * k + i);
                for (int r = 0; r < count; r++)
                    acc[o][r] = (vf)_mm512_dpbf16_ps((__m512)acc[o][r], w, (__m512bh)x[r]);
            }
        }
    } else
#endif
        for (int64_t i = 0; i < k; i += LANES) {
            vf x[FLOAT_ROWS_AT_ONCE];
            for (int r = 0; r < count; r++) x[r] = load(op->x, type, (t + r) * op->x_stride + i);
            for (int o = 0; o < outputs; o++) {
                vf w = load(op->w, type, (n + o) * k + i);
                for (int r = 0; r < count; r++) acc[o][r] += w * x[r];
            }
        }
    for (int r = 0; r < count; r++)
        for (int o = 0; o < outputs; o++) {
            float y = sum(acc[o][r]) + (op->bias ? load_one(op->bias, op->w_type, n + o) : 0.0f);
            store_one(op->y, op->y_type, (t + r) * op->n + n + o, y);
        }
}

INLINE void linear_float(const Op *op, int64_t first, int64_t last, int type) {
    const int64_t end = last * PANEL < op->n ? last * PANEL : op->n, rows = *op->rows;
    int64_t n = first * PANEL;
    for (; n + OUTPUTS_AT_ONCE <= end; n += OUTPUTS_AT_ONCE) {
        int64_t t = 0;
        for (; t + FLOAT_ROWS_AT_ONCE <= rows; t += FLOAT_ROWS_AT_ONCE)
            products(op, n, t, OUTPUTS_AT_ONCE, FLOAT_ROWS_AT_ONCE, type);
        for (; t < rows; t++) products(op, n, t, OUTPUTS_AT_ONCE, 1, type);
    }
    for (; n < end; n++)
        for (int64_t t = 0; t < rows; t++) products(op, n, t, 1, 1, type);
}

static void run_linear_float(const Op *op, int64_t first, int64_t last) {
    if (op->w_type == FLOAT32)
        linear_float(op, first, last, FLOAT32);
    else
        linear_float(op, first, last, BFLOAT16);
}

/* Weights [n, inner] in few bits, in the order that `linear.h` reads; units of work are panels of 16 outputs.
 * `cpu_linear.quantize_int4` and `quantize_int8` say what the numbers are. */

INLINE void pack_int4_group(const Op *op, int64_t row, int64_t g, int type, uint8_t *w, int i, float *deviation) {
    const int64_t from = row * op->inner + g * GROUP;
    const vf a = load(op->x, type, from), b = load(op->x, type, from + LANES);
    const float lowest = -largest(larger(-a, -b)), highest = largest(larger(a, b));
    float step = (highest - lowest) / 15.0f;
    if (step < 1.17549435e-38f) step = 1.17549435e-38f;
    const vf place_a = (a - lowest) / step, place_b = (b - lowest) / step;
    const vf level_a = nearest(place_a), level_b = nearest(place_b);
    const float off = largest(larger(magnitude(place_a - level_a), magnitude(place_b - level_b)));
    if (off > *deviation) *deviation = off;
    /* Least squares for the levels found. */
    const float middle = sum(level_a + level_b) / GROUP, mean = sum(a + b) / GROUP;
    const vf centred_a = level_a - middle, centred_b = level_b - middle;
    float spread = sum(centred_a * centred_a + centred_b * centred_b);
    if (spread < 1.0f) spread = 1.0f;
    uint16_t *pairs = (uint16_t *)(w + 256);
    store_one(pairs, BFLOAT16, 2 * i, sum(centred_a * a + centred_b * b) / spread);
    store_one(pairs, BFLOAT16, 2 * i + 1, mean - load_one(pairs, BFLOAT16, 2 * i) * (middle - 8.0f));
    const vb low = __builtin_convertvector(__builtin_convertvector(level_a, vi), vb);
    const vb high = __builtin_convertvector(__builtin_convertvector(level_b, vi), vb);
    const vb both = low | high << 4;
    for (int j = 0; j < 4; j++) memcpy(w + 64 * j + 4 * i, (const uint8_t *)&both + 4 * j, 4);
}

INLINE void pack_int4(const Op *op, int64_t first, int64_t last, int type) {
    const int64_t groups = op->inner / GROUP;
    float *deviations = op->summed;
    for (int64_t panel = first; panel < last; panel++) {
        uint8_t *w = (uint8_t *)op->y + panel * groups * INT4_BYTES;
        memset(w, 0, groups * INT4_BYTES);
        deviations[panel] = 0.0f;
        for (int i = 0; i < PANEL && panel * PANEL + i < op->n; i++)
            for (int64_t g = 0; g < groups; g++)
                pack_int4_group(op, panel * PANEL + i, g, type, w + g * INT4_BYTES, i, &deviations[panel]);
    }
}

static void run_pack_int4(const Op *op, int64_t first, int64_t last) {
    if (op->x_type == FLOAT32)
        pack_int4(op, first, last, FLOAT32);
    else
        pack_int4(op, first, last, BFLOAT16);
}

INLINE void pack_int8(const Op *op, int64_t first, int64_t last, int type) {
    const int64_t groups = op->inner / GROUP;
    float *scales = op->summed;
    for (int64_t panel = first; panel < last; panel++) {
        uint8_t *w = (uint8_t *)op->y + panel * groups * INT8_BYTES;
        memset(w, 0, groups * INT8_BYTES);
        for (int i = 0; i < PANEL; i++) {
            const int64_t row = panel * PANEL + i;
            scales[row] = 0.0f;
            if (row >= op->n) continue;
            vf most = {0};
            for (int64_t k = 0; k < op->inner; k += LANES)
                most = larger(most, magnitude(load(op->x, type, row * op->inner + k)));
            float scale = largest(most) / 127.0f;
            if (scale < 1.17549435e-38f) scale = 1.17549435e-38f;
            scales[row] = scale;
            for (int64_t k = 0; k < op->inner; k += LANES) {
                const vf x = nearest(load(op->x, type, row * op->inner + k) / scale);
                const vb values = __builtin_convertvector(__builtin_convertvector(x, vi), vb) ^ (int8_t)-128;
                uint8_t *to = w + k / GROUP * INT8_BYTES + k % GROUP / 4 * 64 + 4 * i;
                for (int j = 0; j < 4; j++) memcpy(to + 64 * j, (const uint8_t *)&values + 4 * j, 4);
            }
        }
    }
}

static void run_pack_int8(const Op *op, int64_t first, int64_t last) {
    if (op->x_type == FLOAT32)
        pack_int8(op, first, last, FLOAT32);
    else
        pack_int8(op, first, last, BFLOAT16);
}

/* The line of an output's upper halves and what its values are away from it: see `linear_upper.h`. Returns whether rough
 * results of it are good for anything. */
INLINE int fit_line(const uint8_t *w, int64_t n, float scale, float *vectors, int i) {
    double u = 0, v = 0, uu = 0, uv = 0, vv = 0, size = 0;
    for (int64_t k = 0; k < n; k++) {
        const double upper = w[k] >> 4, value = (double)w[k] - 128.0;
        u += upper, v += value, uu += upper * upper, uv += upper * value, vv += value * value;
        size += fabs(value);
    }
    u /= (double)n, v /= (double)n, size /= (double)n;
    const double spread = uu / (double)n - u * u, shared = uv / (double)n - u * v, square = vv / (double)n - v * v;
    const double slope = shared > 1e-9 ? square / shared : 0.0, offset = v - slope * u;
    double left = square - 2.0 * slope * shared + slope * slope * spread;
    const double deviation = sqrt(left > 0.0 ? left : 0.0);
    double most = 0, match = 0, squares = 0;
    for (int64_t k = 0; k < n; k++) {
        const double value = (double)w[k] - 128.0, distance = value - offset - slope * (double)(w[k] >> 4);
        const double cut = fmax(-size, fmin(size, value));
        most = fmax(most, fabs(distance)), match += distance * cut, squares += cut * cut;
    }
    /* Float sums of that many terms round so much, here and where all bits are read. */
    const double rounding = (double)(n / GROUP + 8) * 1024.0 * sqrt((double)n) / 16777216.0 / DEVIATIONS;
    vectors[i] = scale;
    vectors[PANEL + i] = (float)slope * scale;
    vectors[2 * PANEL + i] = (float)offset * scale;
    vectors[3 * PANEL + i] = (float)(deviation + rounding) * scale;
    return left <= MOST_LEFT * square + 1e-6 && most <= MOST_DISTANCE * deviation + 1e-3 &&
           fabs(match) <= (MOST_MATCH * deviation + 1e-3) * sqrt(squares);
}

/* What PACK_INT8 made in x, and its scales, cut in halves. */
static void run_pack_halves(const Op *op, int64_t first, int64_t last) {
    const int64_t k = op->inner, groups = k / GROUP, panels = (op->n + PANEL - 1) / PANEL;
    uint8_t *values = scratch((size_t)k);
    if (!values) return;
    for (int64_t panel = first; panel < last; panel++) {
        const uint8_t *from = (const uint8_t *)op->x + panel * groups * INT8_BYTES;
        uint8_t *upper = (uint8_t *)op->y + panel * groups * HALF_BYTES, *lower = upper + panels * groups * HALF_BYTES;
        for (int64_t g = 0; g < groups; g++)
            for (int at = 0; at < HALF_BYTES; at++) {
                const uint8_t near = from[g * INT8_BYTES + at], far = from[g * INT8_BYTES + HALF_BYTES + at];
                upper[g * HALF_BYTES + at] = (uint8_t)(near >> 4 | (far & 0xf0));
                lower[g * HALF_BYTES + at] = (uint8_t)((near & 15) | far << 4);
            }
        float *vectors = (float *)op->summed + panel * VECTORS_A_PANEL * PANEL;
        int fits = 1;
        for (int i = 0; i < PANEL; i++) {
            for (int64_t at = 0; at < k; at++) values[at] = from[at / 4 * 64 + 4 * i + at % 4];
            const int is_real = panel * PANEL + i < op->n;
            fits &= fit_line(values, k, ((const float *)op->w_scales)[panel * PANEL + i], vectors, i) || !is_real;
        }
        for (int i = 0; i < PANEL && !fits; i++) vectors[3 * PANEL + i] = ALWAYS_WHOLE;
    }
}

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

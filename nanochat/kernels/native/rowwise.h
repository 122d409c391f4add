/* Operations on rows by themselves; units of work are rows. */

INLINE void take_rows(const Op *op, int64_t first, int64_t last, int type) {
    for (int64_t t = first; t < last; t++) {
        const int64_t from = op->index[t] * op->x_stride, to = t * op->n;
        for (int64_t i = 0; i < op->n; i += LANES) {
            vf x = load(op->x, type, from + i);
            if (op->scale != 1.0f) {
                vf scaled = x * op->scale;
                store(&x, type, 0, scaled); /* rounded to the table's type first */
                x = load(&x, type, 0);
            }
            store(op->y, op->y_type, to + i, x);
        }
    }
}

static void run_take_rows(const Op *op, int64_t first, int64_t last) {
    if (op->x_type == FLOAT32)
        take_rows(op, first, last, FLOAT32);
    else
        take_rows(op, first, last, BFLOAT16);
}

INLINE void rms_norm(const Op *op, int64_t first, int64_t last, int x_type, int wide) {
    const int64_t n = op->n;
    for (int64_t t = first; t < last; t++) {
        const void *from = op->x;
        int type = x_type;
        int64_t start = t * op->x_stride;
        vf squares = {0};
        if (op->residual) {
            for (int64_t i = 0; i < n; i += LANES) {
                vf x = load(op->x, x_type, start + i) + load(op->residual, wide, t * n + i);
                store(op->summed, wide, t * n + i, x);
                if (wide != FLOAT32) x = load(op->summed, wide, t * n + i);
                squares += x * x;
            }
            from = op->summed, type = wide, start = t * n;
        } else {
            for (int64_t i = 0; i < n; i += LANES) {
                vf x = load(op->x, x_type, start + i);
                squares += x * x;
            }
        }
        const float factor = 1.0f / sqrtf(sum(squares) / (float)n + op->eps);
        const float offset = op->plus_one ? 1.0f : 0.0f;
        for (int64_t i = 0; i < n; i += LANES) {
            vf w = load(op->w, op->w_type, i) + offset;
            store(op->y, op->y_type, t * n + i, load(from, type, start + i) * factor * w);
        }
    }
}

static void run_rms_norm(const Op *op, int64_t first, int64_t last) {
    if (op->x_type == BFLOAT16 && op->residual_type == FLOAT32)
        rms_norm(op, first, last, BFLOAT16, FLOAT32);
    else
        rms_norm(op, first, last, op->x_type, op->residual_type);
}

INLINE void gated(const Op *op, int64_t first, int64_t last, int type, int is_silu) {
    const int64_t n = op->n;
    for (int64_t t = first; t < last; t++) {
        const int64_t from = t * op->x_stride;
        for (int64_t i = 0; i < n; i += LANES) {
            vf x = load(op->x, type, from + i), up = load(op->x, type, from + n + i);
            if (is_silu)
                x = x / (1.0f + exponential(-x));
            else
                x = 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * x * x * x)));
            store(op->y, type, t * n + i, x * up);
        }
    }
}

static void run_silu(const Op *op, int64_t first, int64_t last) {
    if (op->x_type == FLOAT32)
        gated(op, first, last, FLOAT32, 1);
    else
        gated(op, first, last, BFLOAT16, 1);
}

static void run_gelu(const Op *op, int64_t first, int64_t last) {
    if (op->x_type == FLOAT32)
        gated(op, first, last, FLOAT32, 0);
    else
        gated(op, first, last, BFLOAT16, 0);
}

static void run_widen(const Op *op, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < op->n; i += LANES)
            store(op->y, FLOAT32, t * op->n + i, load(op->x, BFLOAT16, t * op->x_stride + i));
}

INLINE void quantize(const Op *op, int64_t first, int64_t last, int type) {
    const int64_t k = op->inner, groups = k / GROUP, row_bytes = quantized_row_bytes(k);
    for (int64_t t = first; t < last; t++) {
        int8_t *q = (int8_t *)op->y + t * row_bytes;
        float *scales = (float *)(q + k), *scaled_sums = scales + groups;
        int32_t *offsets = (int32_t *)(scaled_sums + groups);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t from = t * op->x_stride + g * GROUP;
            vf a = load(op->x, type, from), b = load(op->x, type, from + LANES);
            const float scale = largest(larger(magnitude(a), magnitude(b))) / 127.0f;
            const float inverse = scale > 1e-37f ? 1.0f / scale : 0.0f; /* of a smaller one it would be infinite */
            a = nearest(a * inverse), b = nearest(b * inverse);
            vb low = __builtin_convertvector(__builtin_convertvector(a, vi), vb);
            vb high = __builtin_convertvector(__builtin_convertvector(b, vi), vb);
            memcpy(q + g * GROUP, &low, sizeof low);
            memcpy(q + g * GROUP + LANES, &high, sizeof high);
            const float total = sum(a + b);
            const int are_numbers = total == total; /* a group that holds NaN or infinity is all NaN */
            scales[g] = are_numbers ? scale : NAN, scaled_sums[g] = scale * total;
            offsets[g] = are_numbers ? -128 * (int32_t)total : 0;
        }
    }
}

static void run_quantize(const Op *op, int64_t first, int64_t last) {
    if (op->x_type == FLOAT32)
        quantize(op, first, last, FLOAT32);
    else
        quantize(op, first, last, BFLOAT16);
}

/* The first of equal ones; NaN counts as -inf, and 0 if there is nothing above that. */
INLINE int64_t place_of_largest(const float *x, int64_t n) {
    vf high = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf a = load_floats(x + i);
        high = choose(a > high, a, high); /* false for NaN */
    }
    float most = largest(high);
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    int64_t found = 0;
    while (most > -INFINITY && x[found] != most) found++;
    return found;
}

static void run_argmax(const Op *op, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
        ((int64_t *)op->y)[t] = place_of_largest((const float *)op->x + t * op->x_stride, op->n);
}

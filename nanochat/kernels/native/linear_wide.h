/* Linear maps of many rows; units of work are panels of 16 outputs.
 *
 * A few panels of the weight are unpacked at a time, whatever they are kept as, and all rows multiplied by them.
 */

enum { UNPACKED_BYTES = 192 << 10, MOST_PANELS = 16 };

INLINE void unpack_int4(const Op *op, int64_t panel, elem *to) {
    const int64_t groups = op->inner / GROUP;
    const uint8_t *w = (const uint8_t *)op->w + panel * groups * INT4_BYTES;
    for (int64_t k = 0; k < op->inner; k += GROUP, w += INT4_BYTES) {
        const vu pairs = load_bits(w + 256);
        const vf scale = (vf)(pairs << 16), lowest = (vf)(pairs & 0xffff0000u) - 8.0f * scale;
        for (int j = 0; j < 4; j++) {
            const vu levels = load_bits(w + 64 * j);
            for (int half = 0; half < 2; half++)
                for (int byte = 0; byte < 4; byte += 2) {
                    const vi first = (vi)(levels >> (8 * byte + 4 * half) & 15);
                    const vi second = (vi)(levels >> (8 * byte + 8 + 4 * half) & 15);
                    store_pair(to, k + 16 * half + 4 * j + byte, __builtin_convertvector(first, vf) * scale + lowest,
                               __builtin_convertvector(second, vf) * scale + lowest);
                }
        }
    }
}

/* Numbers k to k + 3 of all outputs, of values + 128. */
INLINE void store_values(elem *to, int64_t k, vu values) {
    for (int byte = 0; byte < 4; byte += 2) {
        const vi first = (vi)(values >> (8 * byte) & 255) - 128, second = (vi)(values >> (8 * byte + 8) & 255) - 128;
        store_pair(to, k + byte, __builtin_convertvector(first, vf), __builtin_convertvector(second, vf));
    }
}

/* Without the outputs' scales. */
INLINE void unpack_int8(const Op *op, int64_t panel, elem *to) {
    const uint8_t *w = (const uint8_t *)op->w + panel * (op->inner / GROUP) * INT8_BYTES;
    for (int64_t k = 0; k < op->inner; k += 4, w += 64) store_values(to, k, load_bits(w));
}

/* The same of halves. */
INLINE void unpack_halves(const Op *op, int64_t panel, elem *to) {
    const int64_t groups = op->inner / GROUP, panels = (op->n + PANEL - 1) / PANEL;
    const uint8_t *w = (const uint8_t *)op->w + panel * groups * HALF_BYTES;
    for (int64_t k = 0; k < op->inner; k += GROUP, w += HALF_BYTES) {
        vu upper[8], lower[8];
        load_halves(w, upper);
        load_halves(w + panels * groups * HALF_BYTES, lower);
        for (int j = 0; j < 8; j++) store_values(to, k + 4 * j, upper[j] << 4 | lower[j]);
    }
}

INLINE void unpack_float(const Op *op, int64_t panel, elem *to, int type) {
    for (int64_t k = 0; k < op->inner; k += ELEMS) {
        vu block[PANEL];
        for (int i = 0; i < PANEL; i++) {
            const int64_t n = panel * PANEL + i;
            block[i] = n < op->n ? elems_of(op->w, type, n * op->inner + k, op->inner - k) : (vu){0};
        }
        transpose(block);
        memcpy(to + k * PANEL, block, sizeof block);
    }
}

INLINE void unpack(const Op *op, int64_t panel, elem *to) {
    if (op->kind == LINEAR_WIDE_INT4)
        unpack_int4(op, panel, to);
    else if (op->kind == LINEAR_WIDE_INT8)
        unpack_int8(op, panel, to);
    else if (op->kind == LINEAR_WIDE_HALVES)
        unpack_halves(op, panel, to);
    else if (op->w_type == FLOAT32)
        unpack_float(op, panel, to, FLOAT32);
    else
        unpack_float(op, panel, to, BFLOAT16);
}

/* Of rows of `elem`. */
static void run_linear_wide(const Op *op, int64_t first, int64_t last) {
    const int64_t k = op->inner, rows = *op->rows, size = k * PANEL;
    int64_t at_once = UNPACKED_BYTES / (size * (int64_t)sizeof(elem)) / 2 * 2;
    at_once = at_once < 2 ? 2 : at_once > MOST_PANELS ? MOST_PANELS : at_once;
    elem *w = scratch((size_t)(at_once * size) * sizeof(elem));
    if (!w) return;
    float c[ROWS_AT_A_TIME * 2 * PANEL] __attribute__((aligned(64)));
    begin_products();
    for (int64_t begin = first; begin < last; begin += at_once) {
        const int64_t end = begin + at_once < last ? begin + at_once : last;
        for (int64_t panel = begin; panel < end; panel++) unpack(op, panel, w + (panel - begin) * size);
        for (int64_t t = 0; t < rows; t += ROWS_AT_A_TIME) {
            const int64_t count = rows - t < ROWS_AT_A_TIME ? rows - t : ROWS_AT_A_TIME;
            const elem *x = (const elem *)op->x + t * op->x_stride;
            for (int64_t panel = begin; panel < end; panel += 2) {
                const int panels = panel + 1 < end ? 2 : 1;
                product(x, op->x_stride, w + (panel - begin) * size, k, panels, c, 2 * PANEL, (int)count, 0);
                for (int p = 0; p < panels; p++) {
                    vf scale = splat(1.0f);
                    if (op->kind == LINEAR_WIDE_INT8)
                        scale = load_floats((const float *)op->w_scales + (panel + p) * PANEL);
                    else if (op->kind == LINEAR_WIDE_HALVES)
                        scale = load_floats(panel_vectors(op, panel + p));
                    for (int64_t r = 0; r < count; r++)
                        finish_panel(op, t + r, panel + p, load_floats(c + r * 2 * PANEL + p * PANEL) * scale);
                }
            }
        }
    }
    end_products();
}

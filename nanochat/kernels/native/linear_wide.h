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

/* Without the outputs' scales. */
INLINE void unpack_int8(const Op *op, int64_t panel, elem *to) {
    const uint8_t *w = (const uint8_t *)op->w + panel * (op->inner / GROUP) * INT8_BYTES;
    for (int64_t k = 0; k < op->inner; k += 4, w += 64) {
        const vu values = load_bits(w);
        for (int byte = 0; byte < 4; byte += 2) {
            const vi first = (vi)(values >> (8 * byte) & 255) - 128, second = (vi)(values >> (8 * byte + 8) & 255) - 128;
            store_pair(to, k + byte, __builtin_convertvector(first, vf), __builtin_convertvector(second, vf));
        }
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
    else if (op->w_type == FLOAT32)
        unpack_float(op, panel, to, FLOAT32);
    else
        unpack_float(op, panel, to, BFLOAT16);
}

/* Up to ROWS_AT_A_TIME rows from t on, in `room` where they are of another type. */
INLINE const elem *rows_as_elems(const Op *op, int64_t t, int64_t count, elem *room) {
    if (op->x_type == ELEM) return (const elem *)op->x + t * op->x_stride;
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < op->inner; i += LANES) {
            const int64_t from = (t + r) * op->x_stride + i;
            store(room, ELEM, r * op->inner + i, op->x_type == FLOAT32 ? load(op->x, FLOAT32, from) : load(op->x, BFLOAT16, from));
        }
    return room;
}

static void run_linear_wide(const Op *op, int64_t first, int64_t last) {
    const int64_t k = op->inner, rows = *op->rows, size = k * PANEL;
    int64_t at_once = UNPACKED_BYTES / (size * (int64_t)sizeof(elem)) / 2 * 2;
    at_once = at_once < 2 ? 2 : at_once > MOST_PANELS ? MOST_PANELS : at_once;
    elem *w = scratch((size_t)(at_once * size + (op->x_type == ELEM ? 0 : ROWS_AT_A_TIME * k)) * sizeof(elem));
    if (!w) return;
    elem *room = w + at_once * size;
    const int64_t stride = op->x_type == ELEM ? op->x_stride : k;
    float c[ROWS_AT_A_TIME * 2 * PANEL] __attribute__((aligned(64)));
    begin_products();
    for (int64_t begin = first; begin < last; begin += at_once) {
        const int64_t end = begin + at_once < last ? begin + at_once : last;
        for (int64_t panel = begin; panel < end; panel++) unpack(op, panel, w + (panel - begin) * size);
        for (int64_t t = 0; t < rows; t += ROWS_AT_A_TIME) {
            const int64_t count = rows - t < ROWS_AT_A_TIME ? rows - t : ROWS_AT_A_TIME;
            const elem *x = rows_as_elems(op, t, count, room);
            for (int64_t panel = begin; panel < end; panel += 2) {
                const int panels = panel + 1 < end ? 2 : 1;
                product(x, stride, w + (panel - begin) * size, k, panels, c, 2 * PANEL, (int)count, 0);
                for (int p = 0; p < panels; p++) {
                    const vf scale = op->kind == LINEAR_WIDE_INT8
                                         ? load_floats((const float *)op->w_scales + (panel + p) * PANEL)
                                         : splat(1.0f);
                    for (int64_t r = 0; r < count; r++)
                        finish_panel(op, t + r, panel + p, load_floats(c + r * 2 * PANEL + p * PANEL) * scale);
                }
            }
        }
    }
    end_products();
}

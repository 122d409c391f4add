/* Linear maps of which a row's largest result may be all that is wanted, as of logits: of 8-bit weights the upper halves
 * are read then, and the lower ones only of outputs that may be the largest. Whether all results are wanted is read from
 * `batch_rows` when they run.
 *
 * A value + 128 is 16 * upper + lower. The upper halves of all panels come first, then the lower ones, both in the order
 * of 4-bit levels in `linear.h`, 256 bytes a group without scales. Of each panel four vectors lie elsewhere: the outputs'
 * scales; slope and offset of the line through (upper, value) with the least squares, times the scale; and the root mean
 * square of the values' distance from it, times the scale.
 *
 * The distances are what is left of a number when half of its bits are cut off, so that their sum with a row's numbers is
 * within DEVIATIONS of its deviation but for a chance of e^-18. What may then exceed the row's best is computed from all
 * bits, the very numbers that LINEAR_INT8 has; the other results keep what the upper halves give. Where all are wanted, all
 * are those of LINEAR_INT8.
 */

enum { HALF_BYTES = 256, VECTORS_A_PANEL = 4 };
static const float DEVIATIONS = 6.0f;

/* Four outputs' numbers k = 4 j and on, as the levels of `linear.h` have them. */
INLINE void load_halves(const uint8_t *w, vu *quads) {
    for (int j = 0; j < 4; j++) {
        const vu both = load_bits(w + 64 * j);
        quads[j] = both & 0x0f0f0f0fu, quads[j + 4] = (both >> 4) & 0x0f0f0f0fu;
    }
}

INLINE const float *panel_vectors(const Op *op, int64_t panel) {
    return (const float *)op->w_scales + panel * VECTORS_A_PANEL * PANEL;
}

INLINE void panel_upper(const Op *op, int64_t panel, int64_t t, int count) {
    const int64_t k = op->inner, groups = k / GROUP, row_bytes = quantized_row_bytes(k);
    const uint8_t *w = (const uint8_t *)op->w + panel * groups * HALF_BYTES;
    const int8_t *x = (const int8_t *)op->x + t * row_bytes;
    vf acc[ROWS_AT_ONCE] = {{0}};
    float totals[ROWS_AT_ONCE] = {0};
    for (int64_t g = 0; g < groups; g++, w += HALF_BYTES) {
        vu quads[8];
        load_halves(w, quads);
        for (int r = 0; r < count; r++) {
            const int8_t *row = x + r * row_bytes;
            const float *scales = (const float *)(row + k);
            vi even = {0}, odd = {0};
            for (int j = 0; j < 8; j += 2) {
                even = dot(even, quads[j], row + g * GROUP + 4 * j);
                odd = dot(odd, quads[j + 1], row + g * GROUP + 4 * j + 4);
            }
            acc[r] += __builtin_convertvector(even + odd, vf) * scales[g];
            totals[r] += scales[groups + g];
        }
    }
    const float *vectors = panel_vectors(op, panel);
    const vf slope = load_floats(vectors + PANEL), offset = load_floats(vectors + 2 * PANEL);
    for (int r = 0; r < count; r++) finish_panel(op, t + r, panel, acc[r] * slope + offset * totals[r]);
}

static void run_linear_upper(const Op *op, int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; panel++) FOR_ROWS(panel_upper, op, panel, 0)
}

/* Results from all bits, without bias, of `count` rows, a constant, from row t on. */
INLINE void whole_panel(const Op *op, int64_t panel, int64_t t, int count, vf *acc) {
    const int64_t k = op->inner, groups = k / GROUP, panels = (op->n + PANEL - 1) / PANEL, row_bytes = quantized_row_bytes(k);
    const uint8_t *w = (const uint8_t *)op->w + panel * groups * HALF_BYTES;
    const int8_t *x = (const int8_t *)op->x + t * row_bytes;
    for (int r = 0; r < count; r++) acc[r] = (vf){0};
    for (int64_t g = 0; g < groups; g++, w += HALF_BYTES) {
        vu quads[8], lower[8];
        load_halves(w, quads);
        load_halves(w + panels * groups * HALF_BYTES, lower);
        for (int j = 0; j < 8; j++) quads[j] = quads[j] << 4 | lower[j];
        for (int r = 0; r < count; r++) acc[r] = add_int8_group(acc[r], quads, x + r * row_bytes, k, g);
    }
    const vf scale = load_floats(panel_vectors(op, panel));
    for (int r = 0; r < count; r++) acc[r] *= scale;
}

INLINE void panel_whole(const Op *op, int64_t panel, int64_t t, int count) {
    vf acc[ROWS_AT_ONCE];
    whole_panel(op, panel, t, count, acc);
    for (int r = 0; r < count; r++) finish_panel(op, t + r, panel, acc[r]);
}

/* For each row the exact result of what seems to be its largest, and what deviations are multiplied by. */
static void run_bound(const Op *op, int64_t first, int64_t last) {
    const int64_t k = op->inner, groups = k / GROUP;
    if (*op->batch_rows) return;
    for (int64_t t = first; t < last; t++) {
        const int8_t *row = (const int8_t *)op->x + t * quantized_row_bytes(k);
        const float *scales = (const float *)(row + k);
        float squares = 0.0f, best[PANEL];
        for (int64_t g = 0; g < groups; g++) {
            int32_t sum = 0;
            for (int i = 0; i < GROUP; i++) sum += row[g * GROUP + i] * row[g * GROUP + i];
            squares += scales[g] * scales[g] * (float)sum;
        }
        const int64_t place = place_of_largest((const float *)op->y + t * op->n, op->n);
        vf whole;
        whole_panel(op, place / PANEL, t, 1, &whole);
        memcpy(best, &whole, sizeof best);
        float *bound = (float *)op->summed + 2 * t;
        bound[0] = best[place % PANEL] + (op->bias ? load_one(op->bias, op->w_type, place) : 0.0f);
        bound[1] = DEVIATIONS * sqrtf(squares);
    }
}

/* Whether none of 16 numbers reaches the bound; NaN does. */
INLINE int all_below(vf x, float bound) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bound), _CMP_LT_OQ) == 0xffff;
#else
    float numbers[PANEL];
    memcpy(numbers, &x, sizeof numbers);
    int count = 0;
    for (int i = 0; i < PANEL; i++) count += numbers[i] < bound;
    return count == PANEL;
#endif
}

/* Likely tokens lie side by side, so units that follow each other are panels far apart, unless all are computed. */
static void run_linear_rest(const Op *op, int64_t first, int64_t last) {
    if (*op->batch_rows) {
        for (int64_t panel = first; panel < last; panel++) FOR_ROWS(panel_whole, op, panel, 0)
        return;
    }
    const int64_t panels = (op->n + PANEL - 1) / PANEL, far = (panels + SPREAD - 1) / SPREAD, rows = *op->rows;
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t panel = unit % far * SPREAD + unit / far, begin = panel * PANEL;
        if (panel >= panels) continue;
        const vf deviation = load_floats(panel_vectors(op, panel) + 3 * PANEL);
        for (int64_t t = 0; t < rows; t++) {
            const float *bound = (const float *)op->summed + 2 * t, *y = (const float *)op->y + t * op->n + begin;
            vf known = splat(-INFINITY);
            memcpy(&known, y, sizeof(float) * (size_t)(op->n - begin < PANEL ? op->n - begin : PANEL));
            if (!all_below(known + deviation * bound[1], bound[0])) panel_whole(op, panel, t, 1);
        }
    }
}

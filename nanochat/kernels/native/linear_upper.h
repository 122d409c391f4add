/* Linear maps of which a row's largest result may be all that is wanted, as of logits: of 8-bit weights the upper halves
 * are read then, and the lower ones only of outputs that may be the largest. Whether all results are wanted is read from
 * `batch_rows` when they run.
 *
 * A value + 128 is 16 * upper + lower. The upper halves of all panels come first, then the lower ones, both in the order
 * of 4-bit levels in `linear.h`, 256 bytes a group without scales. Of each panel four vectors lie elsewhere: the outputs'
 * scales; slope and offset of a line through (upper, value), times the scale; and the root mean square of the values'
 * distances from it, with what floats round, times the scale.
 *
 * The line is the one whose distances have no correlation with the values. By that of least squares all values far from 0
 * would be too near to it, and a row whose large numbers meet them, as those of a likely output do, would have a rough
 * result that is systematically wrong.
 *
 * What may exceed the row's best is computed from all bits, the very numbers that LINEAR_INT8 has; the other results keep
 * what the upper halves give. Where all are wanted, all are those of LINEAR_INT8. "May" is: within DEVIATIONS times the root
 * mean square times the row's length. This is no bound for whatever weights: that would be sqrt(inner) instead of
 * DEVIATIONS, and nearly every output would have to be computed. It holds
 *   - always, for a row that has only (DEVIATIONS / MOST_DISTANCE)^2 = 4 numbers other than 0;
 *   - but for a chance of e^-18, if the distances' signs have nothing to do with the row, and their squares neither;
 *   - not for lower halves that are chosen so that they all match one row.
 * So panels are always computed from all bits, marked by ALWAYS_WHOLE, if one of their outputs has
 *   - a distance of more than MOST_DISTANCE root mean squares;
 *   - distances that are more than MOST_LEFT of its variance, as where all values have the same upper half;
 *   - distances of which the sum with the values, each at most their mean size, as a row of length 1, is more than
 *     MOST_MATCH root mean squares. One far weight can do that: the line then follows it and not the many small ones.
 */

enum { HALF_BYTES = 256, VECTORS_A_PANEL = 4 };
static const float DEVIATIONS = 6.0f, MOST_DISTANCE = 3.0f, MOST_LEFT = 0.25f, MOST_MATCH = 3.0f;
static const float ALWAYS_WHOLE = -1.0f; /* in place of a root mean square: these results are below any bound */

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
            acc[r] += __builtin_convertvector(dot_levels(quads, row + g * GROUP), vf) * scales[g];
            totals[r] += scales[groups + g];
        }
    }
    const float *vectors = panel_vectors(op, panel);
    const vf slope = load_floats(vectors + PANEL), offset = load_floats(vectors + 2 * PANEL);
    for (int r = 0; r < count; r++) finish_panel(op, t + r, panel, acc[r] * slope + offset * totals[r]);
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

/* Few of a row's results are exact after it: those of panels that are always whole. */
static void run_linear_upper(const Op *op, int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; panel++) {
        if (panel_vectors(op, panel)[3 * PANEL] == ALWAYS_WHOLE)
            FOR_ROWS(panel_whole, op, panel, 0)
        else
            FOR_ROWS(panel_upper, op, panel, 0)
    }
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

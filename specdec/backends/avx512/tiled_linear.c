/* The matrix product of few rows with a weight in tiles, for CPUs with AVX512-BF16. See tiled_linear.py.
 *
 * The time of a decoding pass is that of reading its weights. So a weight is stored in the order in which this code
 * reads it: COLUMNS outputs at a time, with two inputs each. One accumulator adds up each output in the order of the
 * inputs, for any number of rows, so that a row's bits depend on the row alone.
 */
#include "kernels.h"

#define LINE 64    /* bytes of a register and of a cache line */
#define ROWS 14    /* rows per read of a tile: two accumulators each, and registers are left for weights and inputs */
#define DEPTH 512  /* most inputs of a part, 32 KiB of the first-level cache; all parts have about the same number */
#define DISTANCE 256 /* prefetch distance in lines for a weight that is read once */

typedef struct {
    const bf16 *weight; /* [depth / 2][COLUMNS][2] */
    const bf16 *rows;   /* [num_rows][in_features] */
    float *sums;        /* [num_rows][COLUMNS] */
    const char *next;   /* the lines of the next part of which each group of rows prefetches num_next */
    int num_next;
    int depth, in_features, first;
} Part;

/* Prefetches weights while two inputs are computed, past the larger caches (NTA). These keep their other data, and the
 * thread that sends the tokens after the pass runs twice as fast. If several groups of rows read a part, each of them
 * prefetches its share of the next part, so that memory is never idle. */
INLINE void fetch_ahead(const int read_once, const bf16 *weight, int pair, const Part *part) {
    if (read_once)
        for (int i = 0; i < COLUMNS * 4 / LINE; i++)
            _mm_prefetch((const char *)weight + (DISTANCE + i) * LINE, _MM_HINT_NTA);
    else if (pair < part->num_next)
        _mm_prefetch(part->next + (size_t)pair * LINE, _MM_HINT_NTA);
}

/* Adds the products of `depth` inputs to the sums of num_rows rows; num_rows is a compile-time constant. */
INLINE void add_rows(const int num_rows, const int read_once, Part part) {
    __m512 sums[ROWS][2];
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < 2; i++)
            sums[row][i] = part.first ? _mm512_setzero_ps() : _mm512_loadu_ps(part.sums + row * COLUMNS + i * 16);
    for (int pair = 0; pair < part.depth / 2; pair++) {
        const bf16 *weight = part.weight + (size_t)pair * 2 * COLUMNS;
        fetch_ahead(read_once, weight, pair, &part);
        const __m512i left = _mm512_loadu_si512(weight), right = _mm512_loadu_si512(weight + COLUMNS);
        for (int row = 0; row < num_rows; row++) {
            int32_t both;
            memcpy(&both, part.rows + (size_t)row * part.in_features + pair * 2, sizeof both);
            const __m512i inputs = _mm512_set1_epi32(both);
            sums[row][0] = _mm512_dpbf16_ps(sums[row][0], (__m512bh)inputs, (__m512bh)left);
            sums[row][1] = _mm512_dpbf16_ps(sums[row][1], (__m512bh)inputs, (__m512bh)right);
        }
    }
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < 2; i++)
            _mm512_storeu_ps(part.sums + row * COLUMNS + i * 16, sums[row][i]);
}

INLINE void add_some(int num_rows, const int read_once, Part part) {
    switch (num_rows) {
#define CASE(number) case number: add_rows(number, read_once, part); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#undef CASE
    }
}

/* Adds a part for all rows, in groups of about equal size. */
CPU static void add(int num_rows, Part part) {
    const int num_groups = (num_rows + ROWS - 1) / ROWS;
    if (num_groups == 1) {
        add_some(num_rows, 1, part);
        return;
    }
    part.next = (const char *)(part.weight + (size_t)part.depth * COLUMNS);
    part.num_next = (part.depth * COLUMNS * (int)sizeof(bf16) / LINE + num_groups - 1) / num_groups;
    for (int left = num_groups; left > 0; left--) {
        const int num = (num_rows + left - 1) / left;
        add_some(num, 0, part);
        num_rows -= num;
        part.rows += (size_t)num * part.in_features;
        part.sums += num * COLUMNS;
        part.next += (size_t)part.num_next * LINE;
    }
}

/* Which of the 16 outputs from `column` on exist. */
static inline __mmask16 columns(const Linear *linear, int column) {
    const int left = linear->out_features - column;
    return left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1 << left) - 1);
}

CPU static void store(const Linear *linear, int tile, const float *sums, int num_rows, int onto, bf16 *outputs) {
    for (int i = 0; i < COLUMNS; i += 16) {
        const int column = tile * COLUMNS + i;
        const __mmask16 mask = columns(linear, column);
        for (int row = 0; row < num_rows; row++) {
            bf16 *to = outputs + (size_t)row * linear->out_features + column;
            __m512 sum = _mm512_loadu_ps(sums + row * COLUMNS + i);
            if (onto) {
                const __m256i before = _mm256_maskz_loadu_epi16(mask, to);
                sum = _mm512_add_ps(rounded(sum), (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(before), 16));
            }
            _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

void tile_sums(const Linear *linear, int tile, const bf16 *rows, int num_rows, float *sums) {
    const int in_features = linear->in_features, column = tile * COLUMNS;
    const bf16 *of_tile = linear->weight + (size_t)column * in_features;
    const int num_parts = 1 + (in_features - 1) / DEPTH, pairs = in_features / 2;
    const int depth = (pairs + num_parts - 1) / num_parts * 2;
    for (int input = 0; input < in_features; input += depth) {
        const bf16 *weight = of_tile + (size_t)input * COLUMNS;
        const int left = in_features - input;
        add(num_rows, (Part){weight, rows + input, sums, .depth = left < depth ? left : depth,
                             .in_features = in_features, .first = !input});
    }
    if (!linear->bias)
        return;
    for (int i = 0; i < COLUMNS; i += 16) {
        const __m512 bias = _mm512_maskz_loadu_ps(columns(linear, column + i), linear->bias + column + i);
        for (int row = 0; row < num_rows; row++) {
            float *at = sums + row * COLUMNS + i;
            _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), bias));
        }
    }
}

void multiply(Turn turn, const Product *products, const bf16 *rows, int num_rows) {
    const int chunks = num_chunks(num_rows);
    while (next_item(&turn)) {
        const int row = turn.item % chunks * CHUNK, num = num_rows - row < CHUNK ? num_rows - row : CHUNK;
        const Product *product = products;
        int tile = turn.item / chunks;
        for (; tile >= num_tiles(product->linear); product++)
            tile -= num_tiles(product->linear);
        float sums[CHUNK * COLUMNS];
        tile_sums(product->linear, tile, rows + (size_t)row * product->linear->in_features, num, sums);
        if (!is_first(&turn))
            continue;
        bf16 *outputs = product->outputs + (size_t)row * product->linear->out_features;
        store(product->linear, tile, sums, num, product->onto, outputs);
        item_is_done(&turn);
    }
}

/* A product on its own; in_features is even. Returns 0 if out of memory. */
int specdec_tiled_linear(const Linear *linear, const bf16 *rows, bf16 *outputs, int num_rows, int num_threads) {
    const Product product = {linear, outputs, 0};
    const int num_items = num_tiles(linear) * num_chunks(num_rows);
    Work work = {.results = calloc(num_items ? num_items : 1, 1)};
    if (!work.results)
        return 0;
#pragma omp parallel num_threads(num_threads)
    multiply(join(&work, num_items, num_threads), &product, rows, num_rows);
    free(work.results);
    return 1;
}

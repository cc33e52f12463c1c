/* A matrix product of few rows with a weight in tiles, for CPUs with AVX512-BF16. See specdec/tiled_linear.py.
 *
 * A decoding pass is over when its weights have been read, so a weight lies in memory in the order in which it is read
 * here: COLUMNS outputs at a time, of these two inputs at a time. Every sum of a row is taken in the order of its inputs
 * by one accumulator, however many rows there are, so that a row's bits depend on the row alone.
 *
 * It is no extension module: Python calls it by ctypes. It is not linked with OpenMP either: torch has loaded that, and
 * a second one would have threads of its own, which compete with torch's for the same cores.
 */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define COLUMNS 64 /* outputs of a tile: four registers */
#define ROWS 6     /* that share one reading of a register: with four accumulators each they leave room for a tile's row */
#define CHUNK 48   /* rows for which a part of a tile is read from the cache again and again */
#define DEPTH 2048 /* inputs of such a part: 256 KiB of the second-level cache */

#define CPU __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE static inline __attribute__((always_inline)) CPU

typedef uint16_t bf16;

typedef struct {
    const bf16 *weight; /* [depth / 2][COLUMNS][2] */
    const bf16 *rows;   /* [num_rows][in_features] */
    float *sums;        /* [num_rows][COLUMNS] */
    int depth, in_features, first;
} Part;

/* Adds to the sums of num_rows rows, a number that the compiler knows, what depth inputs give. */
INLINE void add_rows(const int num_rows, Part part) {
    __m512 sums[ROWS][4];
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < 4; i++)
            sums[row][i] = part.first ? _mm512_setzero_ps() : _mm512_loadu_ps(part.sums + row * COLUMNS + i * 16);
    for (int pair = 0; pair < part.depth / 2; pair++) {
        __m512i weight[4];
        for (int i = 0; i < 4; i++)
            weight[i] = _mm512_loadu_si512(part.weight + (size_t)pair * 2 * COLUMNS + i * 32);
        for (int row = 0; row < num_rows; row++) {
            int32_t both;
            memcpy(&both, part.rows + (size_t)row * part.in_features + pair * 2, sizeof both);
            const __m512i inputs = _mm512_set1_epi32(both);
            for (int i = 0; i < 4; i++)
                sums[row][i] = _mm512_dpbf16_ps(sums[row][i], (__m512bh)inputs, (__m512bh)weight[i]);
        }
    }
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < 4; i++)
            _mm512_storeu_ps(part.sums + row * COLUMNS + i * 16, sums[row][i]);
}

CPU static void add(int num_rows, Part part) {
    for (; num_rows >= ROWS; num_rows -= ROWS) {
        add_rows(ROWS, part);
        part.rows += (size_t)ROWS * part.in_features;
        part.sums += ROWS * COLUMNS;
    }
    switch (num_rows) {
    case 5: add_rows(5, part); break;
    case 4: add_rows(4, part); break;
    case 3: add_rows(3, part); break;
    case 2: add_rows(2, part); break;
    case 1: add_rows(1, part); break;
    }
}

/* The first num_columns sums of each row, with the bias, rounded to the nearest. */
CPU static void store(const float *sums, const float *bias, int num_rows, int num_columns, bf16 *outputs, int stride) {
    for (int row = 0; row < num_rows; row++)
        for (int at = 0; at < num_columns; at += 16) {
            const int left = num_columns - at;
            const __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
            __m512 sum = _mm512_loadu_ps(sums + row * COLUMNS + at);
            if (bias)
                sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, bias + at));
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(sum);
            _mm256_mask_storeu_epi16(outputs + (size_t)row * stride + at, mask, rounded);
        }
}

/* outputs [num_rows][out_features] = rows [num_rows][in_features] @ weight.T + bias, in_features an even number.
 *
 * weight: [out_features / COLUMNS, rounded up][in_features / 2][COLUMNS][2]; bias: [out_features] float, or NULL.
 */
void specdec_tiled_linear(const bf16 *weight, const float *bias, const bf16 *rows, bf16 *outputs, int num_rows,
                          int out_features, int in_features, int num_threads) {
    const int num_tiles = (out_features + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int tile = 0; tile < num_tiles; tile++) {
        const int column = tile * COLUMNS;
        const int num_columns = out_features - column < COLUMNS ? out_features - column : COLUMNS;
        const bf16 *of_tile = weight + (size_t)column * in_features;
        for (int row = 0; row < num_rows; row += CHUNK) {
            float sums[CHUNK * COLUMNS];
            const int num = num_rows - row < CHUNK ? num_rows - row : CHUNK;
            const bf16 *of_chunk = rows + (size_t)row * in_features;
            for (int input = 0; input < in_features; input += DEPTH) {
                const int depth = in_features - input < DEPTH ? in_features - input : DEPTH;
                add(num, (Part){of_tile + (size_t)input * COLUMNS, of_chunk + input, sums, depth, in_features, !input});
            }
            store(sums, bias ? bias + column : NULL, num, num_columns, outputs + (size_t)row * out_features + column,
                  out_features);
        }
    }
}

/* Types and functions that the C files of this package share.
 *
 * They are not an extension module: Python calls them through ctypes. They are not linked with OpenMP: torch has loaded
 * it already, and a second OpenMP library would have threads of its own, which compete with torch's for the cores.
 */
#ifndef SPECDEC_KERNELS_H
#define SPECDEC_KERNELS_H

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shared_work.h"

#define CPU __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE static inline __attribute__((always_inline)) CPU
#define HIDDEN __attribute__((visibility("hidden"))) CPU

typedef uint16_t bf16;

INLINE __m512 widened(const bf16 *from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}

/* Rounded to the nearest bf16, as float32. */
INLINE __m512 rounded(__m512 numbers) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(numbers)), 16);
}

INLINE void narrow(bf16 *to, __m512 numbers) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(numbers));
}

/* 2 to the power of x, with a relative error of 2e-7; 0 below 2 to the power of -150. */
INLINE __m512 power(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    static const float factors[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1};
    __m512 sum = _mm512_set1_ps(1.5403530e-4f);
    for (int i = 0; i < 6; i++)
        sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(factors[i]));
    return _mm512_scalef_ps(sum, whole);
}

/* tiled_linear.c --------------------------------------------------------------------------------------------------- */

#define COLUMNS 32 /* outputs of a tile: two registers */
#define CHUNK 56   /* rows that share a part of a tile while it is in the cache */

typedef struct {
    const bf16 *weight; /* [out_features / COLUMNS, rounded up][in_features / 2][COLUMNS][2] */
    const float *bias;  /* [out_features], or NULL */
    int32_t out_features, in_features;
} Linear;

static inline int num_tiles(const Linear *linear) { return (linear->out_features + COLUMNS - 1) / COLUMNS; }

/* sums [num_rows][COLUMNS] = the tile's outputs with bias, in float32, for at most CHUNK rows. */
HIDDEN void tile_sums(const Linear *linear, int tile, const bf16 *rows, int num_rows, float *sums);

/* outputs [num_rows][out_features] = rows [num_rows][in_features] @ weight.T + bias, rounded to bf16. */
typedef struct {
    const Linear *linear;
    bf16 *outputs;
    int onto; /* whether to add the product to the present outputs */
} Product;

static inline int num_chunks(int num_rows) { return (num_rows + CHUNK - 1) / CHUNK; }

/* Products of the same rows, an item for each tile and chunk of rows. All are complete when a thread returns. */
HIDDEN void multiply(Turn turn, const Product *products, const bf16 *rows, int num_rows);

/* coupled_draw.c --------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t seed;
    uint32_t position, domain;
    double temperature, top_p, min_p; /* top_p: above 0; temperature 0: the most likely token, of ties the lowest id */
    int32_t top_k;                    /* 0: no limit */
} Draw;

/* Draws a token from logits [vocab_size], bf16 or float32. Returns 0 if out of memory. */
HIDDEN int draw_row(const Draw *draw, const void *logits, int is_bf16, int vocab_size, int32_t *token);

/* paged_attention.c ------------------------------------------------------------------------------------------------ */

/* [rows][heads][head_dim]; `row` and `head` are strides in elements. */
typedef struct {
    bf16 *at;
    int64_t row, head;
} Rows;

/* Up to LANES queries of one chain, which is a text that ends with rows of the pass. A query is a row and one of the
 * query heads that share a key head. */
typedef struct {
    int32_t keys;  /* start of the chain's keys in Pass.keys */
    int32_t rows;  /* start of its rows in Pass.rows */
    int32_t first; /* first query, counted in the chain */
    int32_t num;   /* number of queries */
} Tile;

/* A pass; the same for all layers. */
typedef struct {
    const int32_t *slots;    /* [num_rows]: slots for the rows' keys and values */
    const int32_t *keys;     /* slots of the keys of each chain, from its first token on */
    const int32_t *rows;     /* pass rows of each chain */
    const int32_t *num_seen; /* for each of these rows: number of keys up to its own */
    const Tile *tiles;
    int32_t num_rows, num_tiles;
} Pass;

typedef struct {
    bf16 *keys, *values; /* the layer's pool, [slots][kv_heads][head_dim] */
    int32_t heads, kv_heads, head_dim;
    int32_t window; /* limit of keys that a row attends to, including its own */
    float scale;    /* of the scores, times log2(e); positive */
} Attention;

/* put stores a row's keys and values in the pool. attend, after all of them are stored, computes each row's output over
 * its own text; an item is one tile and key head. All outputs are complete when a thread returns. */
HIDDEN void put(const Pass *pass, const Attention *attention, int row, Rows key, Rows value);
HIDDEN void attend(Turn turn, const Pass *pass, const Attention *attention, Rows query, Rows output);

/* decoder_layer.c -------------------------------------------------------------------------------------------------- */

typedef struct {
    const bf16 *weight; /* NULL: no norm */
    float epsilon;
} Norm;

typedef struct {
    Linear query, key, value, output, gate, up, down;
    Norm before_attention, before_mlp, of_query, of_key;
    int32_t hidden_size;
} Weights;

typedef struct {
    bf16 *rows;       /* [num_rows][hidden_size]: input and output of each layer */
    bf16 *cos, *sin;  /* [num_rows][head_dim] */
    bf16 *normed;     /* [num_rows][hidden_size] */
    bf16 *query, *key, *value, *attended; /* [num_rows][heads or kv_heads][head_dim]; attended is 0 for padding */
    bf16 *gated;      /* [num_rows][features of gate] */
    int32_t num_rows; /* of the pass, including padding */
} Buffers;

/* The phases of a layer, in order. */
enum { NORM_BEFORE_ATTENTION, HEADS, PLACES, ATTENTION, OUTPUT, NORM_BEFORE_MLP, GATE, DOWN, NUM_PHASES };

/* Work items of a layer's phases; the same for all layers. */
typedef struct {
    int num_items[NUM_PHASES];
    int num_parts[NUM_PHASES];
} Phases;

HIDDEN Phases phases_of_layer(const Pass *pass, const Attention *attention, const Weights *weights, int num_rows,
                              int num_threads);
/* Whether items of a phase may be computed twice. */
HIDDEN int is_product(int phase);
/* Computes a layer with all threads of a parallel region. `works`: one for each phase of the layer. */
HIDDEN void compute_layer(const Pass *pass, const Attention *attention, const Weights *weights, const Buffers *buffers,
                          const Phases *phases, Work *works);
HIDDEN void normalise(Norm norm, const bf16 *from, bf16 *to, int size);

#endif

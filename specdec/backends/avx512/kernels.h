/* What the C files of this package share: numbers, and what one of them computes for another.
 *
 * They are no extension module: Python calls them by ctypes. They are not linked with OpenMP either: torch has loaded
 * that, and a second one would have threads of its own, which compete with torch's for the same cores.
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

/* To the nearest bf16, and back. */
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

/* tiled_linear.c ---------------------------------------------------------------------------------------------------- */

#define COLUMNS 32 /* outputs of a tile: two registers */
#define CHUNK 56   /* rows for which a part of a tile is read from the cache again and again */

typedef struct {
    const bf16 *weight; /* [out_features / COLUMNS, rounded up][in_features / 2][COLUMNS][2] */
    const float *bias;  /* [out_features], or NULL */
    int32_t out_features, in_features;
} Linear;

static inline int num_tiles(const Linear *linear) { return (linear->out_features + COLUMNS - 1) / COLUMNS; }

/* sums [num_rows][COLUMNS]: of num_rows rows, CHUNK at most, those of a tile, with the bias. */
HIDDEN void tile_sums(const Linear *linear, int tile, const bf16 *rows, int num_rows, float *sums);

/* outputs [num_rows][out_features] = rows [num_rows][in_features] @ weight.T + bias, rounded. */
typedef struct {
    const Linear *linear;
    bf16 *outputs;
    int onto; /* added to what is there */
} Product;

static inline int num_chunks(int num_rows) { return (num_rows + CHUNK - 1) / CHUNK; }

/* Products of the same rows, an item for each tile of them and each chunk of rows. They are there when a thread returns. */
HIDDEN void multiply(Turn turn, const Product *products, const bf16 *rows, int num_rows);

/* coupled_draw.c ---------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t seed;
    uint32_t position, domain;
    double temperature, top_p, min_p; /* top_p: above 0; temperature 0: the likeliest token, of equals the first */
    int32_t top_k;                    /* 0: all */
} Draw;

/* The token that is drawn by logits [vocab_size], bf16 or float32. Whether there was memory. */
HIDDEN int draw_row(const Draw *draw, const void *logits, int is_bf16, int vocab_size, int32_t *token);

/* paged_attention.c ------------------------------------------------------------------------------------------------- */

/* [rows][heads][head_dim], apart by so many elements. */
typedef struct {
    bf16 *at;
    int64_t row, head;
} Rows;

/* Of a chain, a text that ends with some rows of the pass: up to LANES queries. A query is a row and one of the query
 * heads that share a key head. */
typedef struct {
    int32_t keys;  /* where the chain's keys begin in the list of them */
    int32_t rows;  /* where its rows begin in theirs */
    int32_t first; /* query */
    int32_t num;
} Tile;

/* The same for all layers. */
typedef struct {
    const int32_t *slots;    /* [num_rows]: where the rows' keys and values go */
    const int32_t *keys;     /* slots of the keys of each chain, from its first token on */
    const int32_t *rows;     /* of each chain */
    const int32_t *num_seen; /* of each of these rows: the keys up to its own */
    const Tile *tiles;
    int32_t num_rows, num_tiles;
} Pass;

typedef struct {
    bf16 *keys, *values; /* the layer's pool, [slots][kv_heads][head_dim] */
    int32_t heads, kv_heads, head_dim;
    int32_t window; /* keys that a row sees at most, its own among them */
    float scale;    /* of the scores, in units of ln 2; positive */
} Attention;

/* A row's keys and values into the pool; then, when all are there, each row's output over those of its own text, an item
 * for each tile and key head. All outputs are there when a thread returns. */
HIDDEN void put(const Pass *pass, const Attention *attention, int row, Rows key, Rows value);
HIDDEN void attend(Turn turn, const Pass *pass, const Attention *attention, Rows query, Rows output);

/* decoder_layer.c --------------------------------------------------------------------------------------------------- */

typedef struct {
    const bf16 *weight; /* NULL: there is none */
    float epsilon;
} Norm;

typedef struct {
    Linear query, key, value, output, gate, up, down;
    Norm before_attention, before_mlp, of_query, of_key;
    int32_t hidden_size;
} Weights;

typedef struct {
    bf16 *rows;       /* [num_rows][hidden_size]: what goes from layer to layer */
    bf16 *cos, *sin;  /* [num_rows][head_dim] */
    bf16 *normed;     /* [num_rows][hidden_size] */
    bf16 *query, *key, *value, *attended; /* [num_rows][heads or kv_heads][head_dim]; attended: 0 where nobody attends */
    bf16 *gated;      /* [num_rows][features of gate] */
    int32_t num_rows; /* of the pass, and padding */
} Buffers;

/* What a layer does, one after the other. */
enum { NORM_BEFORE_ATTENTION, HEADS, PLACES, ATTENTION, OUTPUT, NORM_BEFORE_MLP, GATE, DOWN, NUM_PHASES };

/* The same for all layers. */
typedef struct {
    int num_items[NUM_PHASES];
    int num_parts[NUM_PHASES];
} Phases;

HIDDEN Phases phases_of_layer(const Pass *pass, const Attention *attention, const Weights *weights, int num_rows,
                              int num_threads);
/* Whether items of a phase may be done twice. */
HIDDEN int is_product(int phase);
/* By all threads of a parallel region. `works` are of the layer's phases. */
HIDDEN void compute_layer(const Pass *pass, const Attention *attention, const Weights *weights, const Buffers *buffers,
                          const Phases *phases, Work *works);
HIDDEN void normalise(Norm norm, const bf16 *from, bf16 *to, int size);

#endif

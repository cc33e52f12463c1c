/* A whole decoder layer of the common kind over packed rows, for CPUs with AVX512-BF16. See specdec/decoder_layer.py.
 *
 * Rounds to bf16 where the model's own operations do. What a row becomes depends on the row, and in the attention on its
 * text, alone.
 */
#include "kernels.h"

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
    const bf16 *input;     /* [num_rows][hidden_size] */
    const bf16 *cos, *sin; /* [num_rows][head_dim] */
    bf16 *output;          /* [num_rows][hidden_size] */
    bf16 *normed;          /* [num_rows][hidden_size] */
    bf16 *query, *key, *value, *attended; /* [num_rows][heads or kv_heads][head_dim]; attended: 0 where nobody attends */
    bf16 *gated;           /* [num_rows][features of gate] */
    int32_t num_rows;      /* of the pass, and padding */
    int32_t num_threads;
} Buffers;

CPU static void normalise(Norm norm, const bf16 *from, bf16 *to, int size) {
    __m512 squares = _mm512_setzero_ps();
    for (int at = 0; at < size; at += 16)
        squares = _mm512_fmadd_ps(widened(from + at), widened(from + at), squares);
    const __m512 factor = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(squares) / size + norm.epsilon));
    for (int at = 0; at < size; at += 16)
        narrow(to + at, _mm512_mul_ps(widened(norm.weight + at), rounded(_mm512_mul_ps(widened(from + at), factor))));
}

/* By its position, in halves. */
CPU static void rotate(bf16 *head, const bf16 *cos, const bf16 *sin, int head_dim) {
    const int half = head_dim / 2;
    for (int at = 0; at < half; at += 16) {
        const __m512 left = widened(head + at), right = widened(head + half + at);
        const __m512 turned_left = rounded(_mm512_mul_ps(right, widened(sin + at)));
        const __m512 turned_right = rounded(_mm512_mul_ps(left, widened(sin + half + at)));
        narrow(head + at, _mm512_sub_ps(rounded(_mm512_mul_ps(left, widened(cos + at))), turned_left));
        narrow(head + half + at, _mm512_add_ps(rounded(_mm512_mul_ps(right, widened(cos + half + at))), turned_right));
    }
}

CPU static void place_heads(Norm norm, bf16 *heads, int num_heads, const bf16 *cos, const bf16 *sin, int head_dim) {
    for (int head = 0; head < num_heads; head++) {
        bf16 *at = heads + head * head_dim;
        if (norm.weight)
            normalise(norm, at, at, head_dim);
        rotate(at, cos, sin, head_dim);
    }
}

/* gated [num_rows][features] = silu(gate) * up. Within a parallel region; the threads do not wait for each other. */
CPU static void gate(const Linear *gate, const Linear *up, const bf16 *rows, int num_rows, bf16 *gated) {
    const int tiles = num_tiles(gate), features = gate->out_features;
    const __m512 minus_log2e = _mm512_set1_ps(-1.44269504f), one = _mm512_set1_ps(1);
#pragma omp for schedule(guided) nowait
    for (int tile = 0; tile < tiles; tile++) {
        float gates[CHUNK * COLUMNS], ups[CHUNK * COLUMNS];
        for (int first = 0; first < num_rows; first += CHUNK) {
            const int num = num_rows - first < CHUNK ? num_rows - first : CHUNK;
            const bf16 *chunk = rows + (size_t)first * gate->in_features;
            tile_sums(gate, tile, chunk, num, gates);
            tile_sums(up, tile, chunk, num, ups);
            for (int row = 0; row < num; row++)
                for (int i = 0; i < COLUMNS && tile * COLUMNS + i < features; i += 16) {
                    const __m512 x = rounded(_mm512_loadu_ps(gates + row * COLUMNS + i));
                    const __m512 silu = _mm512_div_ps(x, _mm512_add_ps(one, power(_mm512_mul_ps(x, minus_log2e))));
                    const __m512 by = rounded(_mm512_loadu_ps(ups + row * COLUMNS + i));
                    narrow(gated + (size_t)(first + row) * features + tile * COLUMNS + i,
                           _mm512_mul_ps(rounded(silu), by));
                }
        }
    }
}

/* hidden_size and the gate's features are multiples of 16, head_dim of 32. */
CPU void specdec_decoder_layer(const Pass *pass, const Attention *attention, const Weights *weights,
                               const Buffers *buffers) {
    const Buffers b = *buffers;
    const int size = weights->hidden_size, head_dim = attention->head_dim;
    const int heads = attention->heads, kv_heads = attention->kv_heads;
    const Rows query = {b.query, heads * head_dim, head_dim}, attended = {b.attended, heads * head_dim, head_dim};
    const Rows key = {b.key, kv_heads * head_dim, head_dim}, value = {b.value, kv_heads * head_dim, head_dim};
#pragma omp parallel num_threads(b.num_threads)
    {
#pragma omp for schedule(static)
        for (int row = 0; row < b.num_rows; row++) {
            const bf16 *input = b.input + (size_t)row * size;
            memcpy(b.output + (size_t)row * size, input, size * sizeof *input);
            normalise(weights->before_attention, input, b.normed + (size_t)row * size, size);
        }
        multiply(&weights->query, b.normed, b.num_rows, 0, b.query);
        multiply(&weights->key, b.normed, b.num_rows, 0, b.key);
        multiply(&weights->value, b.normed, b.num_rows, 0, b.value);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int row = 0; row < pass->num_rows; row++) {
            const bf16 *cos = b.cos + (size_t)row * head_dim, *sin = b.sin + (size_t)row * head_dim;
            place_heads(weights->of_query, query.at + row * query.row, heads, cos, sin, head_dim);
            place_heads(weights->of_key, key.at + row * key.row, kv_heads, cos, sin, head_dim);
            put(pass, attention, row, key, value);
        }
        attend(pass, attention, query, attended);
        multiply(&weights->output, b.attended, b.num_rows, 1, b.output);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int row = 0; row < b.num_rows; row++)
            normalise(weights->before_mlp, b.output + (size_t)row * size, b.normed + (size_t)row * size, size);
        gate(&weights->gate, &weights->up, b.normed, b.num_rows, b.gated);
#pragma omp barrier
        multiply(&weights->down, b.gated, b.num_rows, 1, b.output);
    }
}

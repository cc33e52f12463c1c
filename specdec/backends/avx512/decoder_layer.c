/* Decoder layers of the common kind over packed rows, for CPUs with AVX512-BF16. See decoder_layer.py.
 *
 * Rounds to bf16 where the model's own operations do. The result of a row depends on the row alone, and in the
 * attention on its text alone.
 */
#include "kernels.h"

void normalise(Norm norm, const bf16 *from, bf16 *to, int size) {
    __m512 squares = _mm512_setzero_ps();
    for (int at = 0; at < size; at += 16)
        squares = _mm512_fmadd_ps(widened(from + at), widened(from + at), squares);
    const __m512 factor = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(squares) / size + norm.epsilon));
    for (int at = 0; at < size; at += 16)
        narrow(to + at, _mm512_mul_ps(widened(norm.weight + at), rounded(_mm512_mul_ps(widened(from + at), factor))));
}

/* Rotary embedding of a head, half by half. */
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

/* gated [num_rows][features] = silu(gate) * up. Complete when a thread returns. */
CPU static void gate(Turn turn, const Linear *gate, const Linear *up, const bf16 *rows, int num_rows, bf16 *gated) {
    const int chunks = num_chunks(num_rows), features = gate->out_features;
    const __m512 minus_log2e = _mm512_set1_ps(-1.44269504f), one = _mm512_set1_ps(1);
    while (next_item(&turn)) {
        const int tile = turn.item / chunks, first = turn.item % chunks * CHUNK;
        const int num = num_rows - first < CHUNK ? num_rows - first : CHUNK;
        const bf16 *chunk = rows + (size_t)first * gate->in_features;
        float gates[CHUNK * COLUMNS], ups[CHUNK * COLUMNS];
        tile_sums(gate, tile, chunk, num, gates);
        tile_sums(up, tile, chunk, num, ups);
        if (!is_first(&turn))
            continue;
        for (int row = 0; row < num; row++)
            for (int i = 0; i < COLUMNS && tile * COLUMNS + i < features; i += 16) {
                const __m512 x = rounded(_mm512_loadu_ps(gates + row * COLUMNS + i));
                const __m512 silu = _mm512_div_ps(x, _mm512_add_ps(one, power(_mm512_mul_ps(x, minus_log2e))));
                const __m512 by = rounded(_mm512_loadu_ps(ups + row * COLUMNS + i));
                narrow(gated + (size_t)(first + row) * features + tile * COLUMNS + i, _mm512_mul_ps(rounded(silu), by));
            }
        item_is_done(&turn);
    }
}

static Turn join_phase(int phase, const Phases *phases, Work *works) {
    return join(works + phase, phases->num_items[phase], phases->num_parts[phase]);
}

CPU static void normalise_rows(Turn turn, Norm norm, const Buffers *b, int size) {
    for (; next_item(&turn); item_is_done(&turn))
        normalise(norm, b->rows + (size_t)turn.item * size, b->normed + (size_t)turn.item * size, size);
}

void compute_layer(const Pass *pass, const Attention *attention, const Weights *weights, const Buffers *b,
                   const Phases *phases, Work *works) {
    const int size = weights->hidden_size, head_dim = attention->head_dim;
    const int heads = attention->heads, kv_heads = attention->kv_heads;
    const Rows query = {b->query, heads * head_dim, head_dim}, attended = {b->attended, heads * head_dim, head_dim};
    const Rows key = {b->key, kv_heads * head_dim, head_dim}, value = {b->value, kv_heads * head_dim, head_dim};
    const Product to_heads[] = {{&weights->query, b->query, 0}, {&weights->key, b->key, 0}, {&weights->value, b->value, 0}};
    const Product output = {&weights->output, b->rows, 1}, down = {&weights->down, b->rows, 1};

    normalise_rows(join_phase(NORM_BEFORE_ATTENTION, phases, works), weights->before_attention, b, size);
    multiply(join_phase(HEADS, phases, works), to_heads, b->normed, b->num_rows);
    for (Turn turn = join_phase(PLACES, phases, works); next_item(&turn); item_is_done(&turn)) {
        const int row = turn.item;
        const bf16 *cos = b->cos + (size_t)row * head_dim, *sin = b->sin + (size_t)row * head_dim;
        place_heads(weights->of_query, query.at + row * query.row, heads, cos, sin, head_dim);
        place_heads(weights->of_key, key.at + row * key.row, kv_heads, cos, sin, head_dim);
        put(pass, attention, row, key, value);
    }
    attend(join_phase(ATTENTION, phases, works), pass, attention, query, attended);
    multiply(join_phase(OUTPUT, phases, works), &output, b->attended, b->num_rows);
    normalise_rows(join_phase(NORM_BEFORE_MLP, phases, works), weights->before_mlp, b, size);
    gate(join_phase(GATE, phases, works), &weights->gate, &weights->up, b->normed, b->num_rows, b->gated);
    multiply(join_phase(DOWN, phases, works), &down, b->gated, b->num_rows);
}

Phases phases_of_layer(const Pass *pass, const Attention *attention, const Weights *weights, int num_rows,
                       int num_threads) {
    const int chunks = num_chunks(num_rows), attended = pass->num_tiles * attention->kv_heads;
    const int heads = num_tiles(&weights->query) + num_tiles(&weights->key) + num_tiles(&weights->value);
    Phases phases = {.num_items = {num_rows, heads * chunks, pass->num_rows, attended,
                                   num_tiles(&weights->output) * chunks, num_rows, num_tiles(&weights->gate) * chunks,
                                   num_tiles(&weights->down) * chunks}};
    for (int phase = 0; phase < NUM_PHASES; phase++)
        phases.num_parts[phase] = phase == ATTENTION ? attended : num_threads;
    return phases;
}

int is_product(int phase) { return phase == HEADS || phase == OUTPUT || phase == GATE || phase == DOWN; }

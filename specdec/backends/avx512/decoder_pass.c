/* Consecutive decoder layers over packed rows, with embedding and head, for CPUs with AVX512-BF16. See decoder_layer.py
 * and decoder_pass.py.
 */
#include "kernels.h"

/* Embedding and head of a model, with inputs and outputs of a pass. */
typedef struct {
    const bf16 *embedding;  /* [tokens][hidden_size] */
    const bf16 *cos, *sin;  /* [positions][head_dim] */
    Norm norm;
    Linear head;
    const int32_t *token_ids, *positions; /* [num_rows] */
    const int32_t *logit_rows;            /* [num_logit_rows] */
    bf16 *features;                       /* [num_logit_rows][hidden_size]: input of the head */
    bf16 *logits;                         /* [num_logit_rows][out_features of head] */
    int32_t *likeliest;                   /* [num_logit_rows]: of num_tokens, for ties the lowest id */
    uint8_t *sound;                       /* [num_rows]: whether the row is free of NaN and infinity */
    const int32_t *tapped;                /* [num_taps]: layers; the number of layers: behind the last norm */
    bf16 *states;                         /* [num_taps][num_rows][hidden_size]: rows before these layers */
    int32_t num_logit_rows, num_tokens, num_taps;
} Ends;

/* Further passes after a pass. Each feeds, for every chain, the token drawn after the chain's last row. Their outputs,
 * [num_passes][num_chains] rows, follow those of the pass. */
typedef struct {
    const int32_t *last;      /* [num_chains]: index of the last row in logit_rows */
    const int32_t *keys;      /* [num_chains]: start of the chain's keys in Pass.keys */
    const int32_t *positions; /* [num_chains]: position of the first further row */
    const Draw *draws;        /* [num_chains]: draw of the first further token */
    const int32_t *hurried;   /* yield request: if not 0, no further pass begins */
    int32_t *tokens;          /* [num_passes][num_chains]: tokens of the further rows */
    int32_t num_passes, num_chains;
    int32_t num_done; /* passes computed */
} Further;

enum { EMBEDDING, LAST_NORM, HEAD, LOGITS, NUM_ENDS };

static void embed(Turn turn, const Ends *ends, const Buffers *b, int hidden_size, int head_dim) {
    for (; next_item(&turn); item_is_done(&turn)) {
        const size_t row = turn.item, token = ends->token_ids[row], position = ends->positions[row];
        memcpy(b->rows + row * hidden_size, ends->embedding + token * hidden_size, hidden_size * sizeof(bf16));
        memcpy(b->cos + row * head_dim, ends->cos + position * head_dim, head_dim * sizeof(bf16));
        memcpy(b->sin + row * head_dim, ends->sin + position * head_dim, head_dim * sizeof(bf16));
    }
}

/* Copies the rows before `layer`, if it is tapped. Complete when a thread returns. */
static void tap(Work *works, const Ends *ends, const Buffers *b, int layer, int num_layers, int size, int num_threads) {
    for (int i = 0; i < ends->num_taps; i++) {
        if (ends->tapped[i] != layer)
            continue;
        bf16 *states = ends->states + (size_t)i * b->num_rows * size;
        for (Turn turn = join(works + i, b->num_rows, num_threads); next_item(&turn); item_is_done(&turn)) {
            const size_t at = (size_t)turn.item * size;
            if (layer < num_layers)
                memcpy(states + at, b->rows + at, size * sizeof(bf16));
            else
                normalise(ends->norm, b->rows + at, states + at, size);
        }
    }
}

/* Which of 32 bf16 are NaN or infinite. */
INLINE __mmask32 not_finite(__m512i numbers) {
    return _mm512_cmpge_epu16_mask(_mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff)), _mm512_set1_epi16(0x7f80));
}

INLINE __mmask32 lanes(int num) { return num >= 32 ? 0xffffffff : ((__mmask32)1 << num) - 1; }

CPU static int all_finite(const bf16 *numbers, int size) {
    __mmask32 found = 0;
    for (int at = 0; at < size; at += 32)
        found |= not_finite(_mm512_maskz_loadu_epi16(lanes(size - at), numbers + at));
    return !found;
}

/* No NaN or +infinity, and not only -infinity: some models exclude tokens by -infinity, but never all of them. */
CPU static int logits_are_sound(const bf16 *logits, int size) {
    __mmask32 finite = 0, wrong = 0;
    for (int at = 0; at < size; at += 32) {
        const __m512i some = _mm512_maskz_loadu_epi16(lanes(size - at), logits + at);
        const __mmask32 infinite = not_finite(some);
        finite |= ~infinite & lanes(size - at);
        wrong |= infinite & ~_mm512_cmpeq_epu16_mask(some, _mm512_set1_epi16((short)0xff80));
    }
    return finite && !wrong;
}

/* Checks the rows and normalises the logit rows. A NaN stays in its row, so the last layer's values show it. */
CPU static void finish_rows(Turn turn, const Ends *ends, const Buffers *b, int hidden_size, int num_values) {
    for (; next_item(&turn); item_is_done(&turn)) {
        const int row = turn.item, wanted = row - b->num_rows;
        if (wanted < 0)
            ends->sound[row] = all_finite(b->value + (size_t)row * num_values, num_values);
        else
            normalise(ends->norm, b->rows + (size_t)ends->logit_rows[wanted] * hidden_size,
                      ends->features + (size_t)wanted * hidden_size, hidden_size);
    }
}

CPU static int32_t first_of_largest(const bf16 *logits, int num_tokens) {
    __m512 largest = _mm512_set1_ps(-INFINITY);
    __m512i at = _mm512_set1_epi32(0), here = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int token = 0; token < num_tokens; token += 16, here = _mm512_add_epi32(here, _mm512_set1_epi32(16))) {
        const __mmask16 some = (__mmask16)lanes(num_tokens - token);
        const __m512i raw = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, logits + token));
        const __m512 numbers = (__m512)_mm512_slli_epi32(raw, 16);
        const __mmask16 larger = _mm512_mask_cmp_ps_mask(some, numbers, largest, _CMP_GT_OQ);
        largest = _mm512_mask_mov_ps(largest, larger, numbers);
        at = _mm512_mask_mov_epi32(at, larger, here);
    }
    const __mmask16 best = _mm512_cmpeq_ps_mask(largest, _mm512_set1_ps(_mm512_reduce_max_ps(largest)));
    return _mm512_mask_reduce_min_epi32(best, at);
}

static void look_at_logits(Turn turn, const Ends *ends) {
    for (; next_item(&turn); item_is_done(&turn)) {
        const bf16 *logits = ends->logits + (size_t)turn.item * ends->head.out_features;
        ends->likeliest[turn.item] = first_of_largest(logits, ends->num_tokens);
        if (!logits_are_sound(logits, ends->num_tokens))
            __atomic_store_n(ends->sound + ends->logit_rows[turn.item], 0, __ATOMIC_RELAXED);
    }
}

static int compute_pass(const Pass *pass, const Attention *attention, const Weights *weights, int num_layers,
                         const Ends *ends, const Buffers *b, int num_threads) {
    const int size = weights->hidden_size, head_dim = attention->head_dim, rows = b->num_rows;
    const Phases phases = phases_of_layer(pass, attention, weights, rows, num_threads);
    int num_results = 0;
    for (int phase = 0; phase < NUM_PHASES; phase++)
        num_results += is_product(phase) ? phases.num_items[phase] : 0;
    const int wanted = ends ? ends->num_logit_rows : 0;
    const int head_items = ends ? num_tiles(&ends->head) * num_chunks(wanted) : 0;
    const int num_taps = ends ? ends->num_taps : 0;
    const size_t num_works = NUM_ENDS + (size_t)num_layers * NUM_PHASES + num_taps;
    Work *const of_ends = calloc(1, num_works * sizeof(Work) + (size_t)num_layers * num_results + head_items);
    if (!of_ends)
        return 0;
    Work *const of_layers = of_ends + NUM_ENDS, *const of_taps = of_layers + (size_t)num_layers * NUM_PHASES;
    uint8_t *next = (uint8_t *)(of_ends + num_works);
    for (int i = 0; i < num_layers * NUM_PHASES; i++)
        if (is_product(i % NUM_PHASES)) {
            of_layers[i].results = next;
            next += phases.num_items[i % NUM_PHASES];
        }
    of_ends[HEAD].results = next;
#pragma omp parallel num_threads(num_threads)
    {
        if (ends)
            embed(join(of_ends + EMBEDDING, rows, num_threads), ends, b, size, head_dim);
        for (int layer = 0; layer < num_layers; layer++) {
            if (num_taps)
                tap(of_taps, ends, b, layer, num_layers, size, num_threads);
            compute_layer(pass, attention + layer, weights + layer, b, &phases, of_layers + layer * NUM_PHASES);
        }
        if (ends) {
            tap(of_taps, ends, b, num_layers, num_layers, size, num_threads);
            const Product logits = {&ends->head, ends->logits, 0};
            const Turn last = join(of_ends + LAST_NORM, rows + wanted, num_threads);
            finish_rows(last, ends, b, size, attention->kv_heads * head_dim);
            multiply(join(of_ends + HEAD, head_items, num_threads), &logits, ends->features, wanted);
            look_at_logits(join(of_ends + LOGITS, wanted, num_threads), ends);
        }
    }
    free(of_ends);
    return 1;
}

/* Draws a chain's next token from the logits of the last pass. Returns 0 if out of memory. */
static int draw(const Further *further, int chain, int number, const Ends *ends, int32_t *token) {
    const int row = number ? chain : further->last[chain];
    Draw draw = further->draws[chain];
    draw.position += number;
    *token = ends->likeliest[row];
    const bf16 *logits = ends->logits + (size_t)row * ends->head.out_features;
    return !draw.temperature || draw_row(&draw, logits, 1, ends->num_tokens, token);
}

static int draw_all(const Further *further, int number, const Ends *ends, int32_t *tokens, int num_threads) {
    const int num = further->num_chains;
    int there_was_memory = 1, num_drawn = 0;
    for (int chain = 0; chain < num; chain++)
        num_drawn += further->draws[chain].temperature != 0;
    Work work = {0};
#pragma omp parallel num_threads(num_threads) if (num_drawn > 1)
    for (Turn turn = join(&work, num, num); next_item(&turn); item_is_done(&turn))
        if (!draw(further, turn.item, number, ends, tokens + turn.item))
            __atomic_store_n(&there_was_memory, 0, __ATOMIC_RELAXED);
    return there_was_memory;
}

static int go_on(const Pass *pass, const Attention *attention, const Weights *weights, int num_layers, const Ends *ends,
                 Further *further, const Buffers *b, int num_threads) {
    const int num = further->num_chains, groups = attention->heads / attention->kv_heads;
    int32_t *const rows = malloc(num * (4 * sizeof(int32_t) + sizeof(Tile)));
    if (!rows)
        return 0;
    int32_t *const seen = rows + num, *const slots = seen + num, *const positions = slots + num;
    Tile *const tiles = (Tile *)(positions + num);
    const Pass next_pass = {slots, pass->keys, rows, seen, tiles, num, num};
    Ends next = *ends;
    Buffers buffers = *b;
    buffers.num_rows = next.num_logit_rows = num;
    next.num_taps = 0;
    next.positions = positions;
    next.logit_rows = rows;
    for (int chain = 0; chain < num; chain++) {
        rows[chain] = chain;
        tiles[chain] = (Tile){further->keys[chain], chain, 0, groups};
    }
    int there_was_memory = 1, num_logits = ends->num_logit_rows, num_rows = b->num_rows;
    for (int number = 0; number < further->num_passes && there_was_memory; number++) {
        if (__atomic_load_n(further->hurried, __ATOMIC_RELAXED))
            break;
        int32_t *const tokens = further->tokens + (size_t)number * num;
        next.token_ids = tokens;
        there_was_memory = draw_all(further, number, &next, tokens, num_threads);
        for (int chain = 0; chain < num; chain++) {
            positions[chain] = further->positions[chain] + number;
            seen[chain] = positions[chain] + 1;
            slots[chain] = pass->keys[further->keys[chain] + positions[chain]];
        }
        next.logits += (size_t)num_logits * ends->head.out_features;
        next.features += (size_t)num_logits * weights->hidden_size;
        next.likeliest += num_logits;
        next.sound += num_rows;
        there_was_memory = there_was_memory && compute_pass(&next_pass, attention, weights, num_layers, &next, &buffers,
                                                            num_threads);
        num_logits = num_rows = num;
        further->num_done = number + 1;
    }
    free(rows);
    return there_was_memory;
}

/* All layers have the same sizes. hidden_size and the gate's features are multiples of 16, head_dim of 32. If `ends` is
 * NULL, b->rows and the angles are inputs, and b->rows is the output. Returns 0 if out of memory. */
int specdec_decoder_pass(const Pass *pass, const Attention *attention, const Weights *weights, int num_layers,
                         const Ends *ends, Further *further, const Buffers *b, int num_threads) {
    return compute_pass(pass, attention, weights, num_layers, ends, b, num_threads) &&
           (!further || go_on(pass, attention, weights, num_layers, ends, further, b, num_threads));
}

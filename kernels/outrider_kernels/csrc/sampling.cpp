// The next token of a row of logits: outrider/engine/sampling.py, without sorting anything.
//
// A token is kept by the filters if few enough tokens are better (top_k), if those that are better
// weigh little enough (top_p), and if it weighs enough itself (min_p). So it is enough to find the
// best of score + noise and to ask whether that one is kept; if not, neither is any worse one.
#include "kernels.h"
#include "mass.h"
#include "philox.h"
#include "row_scan.h"
#include "scratch.h"
#include "units.h"

namespace {

constexpr float MAX_GUMBEL = 22.88f;  // above every noise
constexpr float HEAD_DEPTH = 8.0f;    // below the best score: where top_p first looks
constexpr int64_t HEAD_SIZE = 1024;   // ids; with more, looking at each alone is no saving
constexpr float MARGIN = 1e-3f;       // far more than the rounding of a score or an exponent

// Some tokens of a row, ids rising.
struct List {
    int32_t* ids;
    float* scores;
    int64_t size;

    Lanes scores_at(int64_t i) const {
        int64_t n = size - i;
        if (n >= LANES) return load(scores + i);
        return keep_first(load_first(scores + i, static_cast<int>(n)), static_cast<int>(n),
                          all(-INFINITE));
    }
    void append(int64_t id, float score) {
        ids[size] = static_cast<int32_t>(id);
        scores[size++] = score;
    }
};

// A token on its way to be chosen. Better tokens have a higher score, or the same and a lower id.
struct Winner {
    int64_t id;  // or place in a list
    float score, noisy;
};

struct Filters {
    int64_t top_k;  // 0 for all
    double top_p;
    float min_p;
    // Worse tokens than this one, and itself, are known to be left out by top_p.
    Winner out = {INT64_MAX, -INFINITE, 0.0f};

    bool keep(int64_t id, float score) const {
        if (score < out.score || (score == out.score && id >= out.id)) return false;
        return min_p == 0.0f || weight_of(score) >= min_p;
    }
};

// The k-th best of scores, which are at most 0: by halving the range of their bits.
INLINE float kth_best(const float* scores, int64_t n, int64_t k) {
    uint32_t low = 0, high = 0x7F800000;  // of -score; high is -inf's
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        uint32_t num_better = 0;
        for (int64_t i = 0; i < n; i++) num_better += (bits_of_float(scores[i]) & 0x7FFFFFFF) <= middle;
        if (num_better >= k)
            high = middle;
        else
            low = middle + 1;
    }
    return -float_of_bits(low);
}

// The top_k best; `spare` has room for a score of each group.
INLINE void find_best(const Row& row, int64_t top_k, float* spare, List& list) {
    // So many groups have a member at least as good as the k-th best of their best members.
    float limit = -INFINITE;
    bool by_chunk = top_k <= row.num_chunks();
    int64_t num_groups = by_chunk ? row.num_chunks() : row.num_chunks() * LANES;
    if (top_k <= num_groups) {
        const float* largest = by_chunk ? row.chunk_max : row.lane_max;
        for (int64_t i = 0; i < num_groups; i++) spare[i] = row.score(largest[i]);
        limit = kth_best(spare, num_groups, top_k);
    }
    for (int64_t chunk = 0; chunk < row.num_chunks(); chunk++) {
        if (row.score(row.chunk_max[chunk]) < limit) continue;
        const float* x = row.chunk(chunk);
        for (int64_t i = 0; i < CHUNK; i += LANES) {
            uint32_t found = at_least(row.scores(x + i), all(limit));
            for (; found; found &= found - 1) {
                int64_t place = i + __builtin_ctz(found), id = chunk * CHUNK + place;
                if (id < row.num_ids) list.append(id, row.score(x[place]));
            }
        }
    }
    if (list.size <= top_k) return;
    limit = kth_best(list.scores, list.size, top_k);
    int64_t num_better = 0, num_kept = 0;
    for (int64_t i = 0; i < list.size; i++) num_better += list.scores[i] > limit;
    int64_t num_equal = top_k - num_better;
    for (int64_t i = 0; i < list.size; i++) {
        bool equal = list.scores[i] == limit;
        if (list.scores[i] < limit || (equal && num_equal == 0)) continue;
        num_equal -= equal;
        list.ids[num_kept] = list.ids[i];
        list.scores[num_kept++] = list.scores[i];
    }
    list.size = num_kept;
}

// The mass of all, and the tokens near the best in `head`, and theirs. A head that has more is left
// off in the middle and weighs nothing.
INLINE int64_t mass_of_all(const Row& row, List& head, int64_t& head_mass) {
    Mass everything, near;
    bool complete = true;
    for (int64_t chunk = 0; chunk < row.num_chunks(); chunk++) {
        if (row.score(row.chunk_max[chunk]) < NO_MASS_BELOW) continue;
        const float* x = row.chunk(chunk);
        for (int64_t i = 0; i < CHUNK; i += LANES) {
            Lanes scores = row.scores(x + i), weights = weights_of(scores);
            add(everything, weights);
            uint32_t found = complete ? at_least(scores, all(-HEAD_DEPTH)) : 0;
            if (!found) continue;
            add(near, zero_below(weights, scores, -HEAD_DEPTH));
            for (; found; found &= found - 1) {
                int64_t place = i + __builtin_ctz(found);
                head.append(chunk * CHUNK + place, row.score(x[place]));
            }
            complete = head.size <= HEAD_SIZE - LANES;
        }
    }
    head_mass = complete ? total(near) : 0;
    return total(everything);
}

// The mass of those of `size` that are better than one; scores_at(i) has 16 of them from i on.
template <class Scores>
INLINE int64_t mass_above(const Winner& one, int64_t size, Scores scores_at) {
    Mass mass;
    float next = float_of_bits(bits_of_float(one.score) - 1);  // the next better score
    if (one.score == 0.0f) next = INFINITE;
    for (int64_t i = 0; i < size; i += LANES) {
        Lanes scores = scores_at(i), weights = weights_of(scores);
        int64_t num_before = one.id - i;
        if (num_before >= LANES)
            weights = zero_below(weights, scores, one.score);
        else if (num_before <= 0)
            weights = zero_below(weights, scores, next);
        else
            weights = keep_first(zero_below(weights, scores, one.score),
                                 static_cast<int>(num_before), zero_below(weights, scores, next));
        add(mass, weights);
    }
    return total(mass);
}

INLINE int64_t mass_above(const Winner& one, const List& list) {
    return mass_above(one, list.size, [&](int64_t i) INLINE_LAMBDA { return list.scores_at(i); });
}

INLINE int64_t mass_above(const Winner& one, const Row& row) {
    int64_t mass = 0;
    for (int64_t chunk = 0; chunk < row.num_chunks(); chunk++) {
        if (row.score(row.chunk_max[chunk]) < one.score) continue;
        const float* x = row.chunk(chunk);
        Winner here = {one.id - chunk * CHUNK, one.score, one.noisy};
        mass += mass_above(here, CHUNK, [&](int64_t i) INLINE_LAMBDA { return row.scores(x + i); });
    }
    return mass;
}

// With noise g = -log(E) and E > w a token reaches score + g >= bar only if w < exp(score - bar).
// What is to be added to score * log2(e) for log2 of that limit, for numbers below 2**SIZE.
INLINE float offset_of(float bar) { return SIZE + MARGIN - bar * LOG2_E; }

INLINE void consider(Winner& winner, int64_t id, float score, uint32_t word, const Filters& filters) {
    float noisy = score + gumbel_of(word);
    if (noisy < winner.noisy || (noisy == winner.noisy && id > winner.id)) return;
    if (filters.keep(id, score)) winner = {id, score, noisy};
}

// The best of score + noise in a list.
INLINE Winner pick(const List& list, int64_t best_place, const Draws& draws, const Filters& filters) {
    Winner winner = {best_place, 0.0f, gumbel_of(word_of(draws, list.ids[best_place]))};
    for (int64_t i = 0; i < list.size; i++) {
        float score = list.scores[i];
        if (score < winner.noisy - MAX_GUMBEL) continue;
        uint32_t word = word_of(draws, list.ids[i]);
        float limit = score * LOG2_E + offset_of(winner.noisy) + 32.0f - SIZE;
        if (static_cast<float>(word) > __builtin_exp2f(limit)) continue;
        consider(winner, i, score, word, filters);
    }
    return winner;
}

// The same over all of a row.
INLINE Winner pick(const Row& row, const Draws& draws, const Filters& filters, float floor) {
    Winner winner = {row.best_id, 0.0f, gumbel_of(word_of(draws, row.best_id))};
    float slope = LOG2_E / row.temperature, offset = 0.0f, cut = 0.0f;
    auto raise = [&]() INLINE_LAMBDA {
        offset = offset_of(winner.noisy);
        float least = winner.noisy - MAX_GUMBEL > floor ? winner.noisy - MAX_GUMBEL : floor;
        cut = least * row.temperature * (1.0f + MARGIN);
    };
    raise();
    uint32_t words[WORDS];
    for (int64_t chunk = 0; chunk < row.num_chunks(); chunk++) {
        if (row.chunk_max[chunk] - row.best < cut) continue;
        for (int64_t first = chunk * CHUNK; first < (chunk + 1) * CHUNK; first += WORDS) {
            const float* x = row.chunk(chunk) + first % CHUNK;
            uint32_t hopeful = 0;
            for (int64_t i = 0; i < WORDS; i += LANES)
                hopeful |= at_least(load(x + i) - all(row.best), all(cut));
            if (!hopeful) continue;
            words_of(draws, first, words);
            for (int64_t i = 0; i < WORDS; i += LANES) {
                Lanes limit = fma(load(x + i) - all(row.best), all(slope), all(offset));
                uint32_t found = at_least(power_above(limit), sizes(words + i));
                for (; found; found &= found - 1) {
                    int64_t place = i + __builtin_ctz(found), id = first + place;
                    if (id >= row.num_ids) break;
                    consider(winner, id, row.score(x[place]), words[place], filters);
                    raise();
                }
            }
        }
    }
    return winner;
}

thread_local Scratch scratch_of_choice;

// The token that a row of logits gives at a position, or -1 if it has no finite best.
int64_t token_of(const Choice& choice, const float* logits, int64_t position) {
    int64_t num_chunks = (choice.num_ids + CHUNK - 1) / CHUNK, padded = num_chunks * CHUNK;
    float* memory = scratch_of_choice.of(2 * padded + CHUNK + (2 * LANES + 1) * num_chunks);
    float* tail = memory + 2 * padded;
    float* lane_max = tail + CHUNK;
    float* spare = lane_max + LANES * num_chunks;
    Row row = {logits, choice.num_ids, tail, lane_max, spare + LANES * num_chunks, 0.0f, 1.0f, 0};
    if (!scan(row)) return -1;
    if (choice.temperature == 0.0) return row.best_id;
    row.temperature = static_cast<float>(choice.temperature > 1e-30 ? choice.temperature : 1e-30);

    Filters filters = {choice.top_k < choice.num_ids ? choice.top_k : 0, choice.top_p,
                       static_cast<float>(choice.min_p)};
    Draws draws(choice.seed, position, 0);
    List list = {reinterpret_cast<int32_t*>(memory), memory + padded, 0};
    bool in_list = filters.top_k > 0;
    double allowed = 0.0;  // of the mass of those that are better
    float floor = -INFINITE;
    if (in_list) find_best(row, filters.top_k, spare, list);
    if (filters.top_p < 1.0) {
        int64_t mass = 0, head_mass = 0;
        if (in_list) {
            mass = mass_above({INT64_MAX, -INFINITE, 0.0f}, list);
        } else {
            mass = mass_of_all(row, list, head_mass);
        }
        allowed = filters.top_p * static_cast<double>(mass);
        in_list = in_list || static_cast<double>(head_mass) >= allowed;
    }
    // Weights fall with the score but for their last bits.
    if (filters.min_p > 0.0f) floor = __builtin_logf(filters.min_p) - MARGIN;

    int64_t best_place = 0;
    if (in_list)
        while (list.ids[best_place] != row.best_id) best_place++;
    for (;;) {
        Winner winner = in_list ? pick(list, best_place, draws, filters) : pick(row, draws, filters, floor);
        int64_t id = in_list ? list.ids[winner.id] : winner.id;
        if (filters.top_p >= 1.0 || id == row.best_id) return id;
        int64_t above = in_list ? mass_above(winner, list) : mass_above(winner, row);
        if (static_cast<double>(above) < allowed) return id;
        filters.out = winner;
        if (winner.score > floor) floor = winner.score - MARGIN;
    }
}

}  // namespace

void choose_tokens(Choice& choice) {
    for (int64_t i = 0; i < choice.num_rows; i++) {
        int64_t expected = choice.tokens[i];
        choice.tokens[i] = token_of(choice, choice.logits + i * choice.stride, choice.position + i);
        choice.num_chosen = i + 1;
        if (choice.tokens[i] != expected) break;
    }
}

// Paged attention where the pages lie. What a row's result is made of depends on its own query and
// on the keys it sees, by their absolute positions, and on nothing else:
//
//     split      SPLIT_KEYS keys from a multiple of that position; a row's sums over one begin anew
//     key tile   KEY_TILE keys of a split; softmax is kept up from one to the next
//     join       the splits of a row, one after the other
//
// Hidden keys weigh exactly zero. Tiles of queries, units of work and threads only say who computes
// a row when, and with which others.
#include <initializer_list>

#include "cache_rows.h"
#include "gemm.h"
#include "kernels.h"
#include "scratch.h"
#include "transpose.h"
#include "units.h"

namespace {

thread_local Scratch scratch;

// Rows of a tile while it is computed. The best score of a row and its sum of weights stand behind
// its values, in units of log 2.
struct Rows {
    int64_t width, stride;  // of `sums`: head_dim up to whole lanes, and PARTIAL_EXTRA

    float& best(float* row) const { return row[width]; }
    float& total(float* row) const { return row[width + 1]; }

    // Take the next split's row into that of the splits before.
    void join(float* row, float* next) const {
        float most = best(row) > best(next) ? best(row) : best(next);
        Lanes scales = exp2(keep_first(all(best(row) - most), 1, all(best(next) - most)));
        float scale[LANES];
        store(scale, scales);
        total(row) = sum(fma(keep_first(all(total(row)), 1, all(0.0f)), all(scale[0]),
                             keep_first(all(total(next) * scale[1]), 1, all(0.0f))));
        best(row) = most;
        for (int64_t d = 0; d < width; d += LANES)
            store(row + d, fma(load(row + d), all(scale[0]), load(next + d) * all(scale[1])));
    }
};

// A key tile: where the keys and values of a unit's first head begin, from the cache's beginning.
struct Keys {
    int64_t places[KEY_TILE];
    int count;
    int64_t num_heads;  // of the unit
};

// The two products, by themselves: once compiled, they do for every type of cache.
void score_keys(const float* queries, int64_t width, const float* keys, int num_keys, float* scores,
                int num_rows) {
    gemm<false>(
        queries, width, [=](int i) INLINE_LAMBDA { return keys + i * KEY_TILE; },
        static_cast<int>(width), scores, KEY_TILE, num_rows, (num_keys + LANES - 1) / LANES);
}
void add_values(const float* weights, const float* const* values, int num_keys, float* sums,
                int64_t stride, int num_rows, int num_lanes) {
    gemm<true>(
        weights, KEY_TILE, [=](int i) INLINE_LAMBDA { return values[i]; }, num_keys, sums, stride,
        num_rows, num_lanes);
}

// The work of one unit. Its heads take turns at each key tile: they lie next to each other there,
// and memory is read from one end to the other. T is what the cache holds.
template <class T>
struct Attention {
    const AttentionJob& job;
    const Unit& unit;
    const AttentionPlan& plan = job.plan;
    const Tile& tile = plan.tiles[unit.tile];
    const int64_t heads = job.shape.heads, kv_heads = job.shape.kv_heads;
    const int64_t group = heads / kv_heads;
    const int64_t num_rows = tile.num_tokens * group;  // of a KV head
    const int64_t num_heads = unit.head_end - unit.head_begin;
    const int64_t width = job.shape.head_dim;
    const int64_t cached = row_size<T>(width);  // elements of a row of the cache
    const Rows rows = {(width + LANES - 1) / LANES * LANES,
                       (width + LANES - 1) / LANES * LANES + PARTIAL_EXTRA};
    float *queries, *keys, *values, *scores, *sums, *joined;

    Attention(const AttentionJob& job_, const Unit& unit_) : job(job_), unit(unit_) {
        int64_t all_rows = num_heads * num_rows;
        queries = scratch.of(all_rows * (width + 2 * rows.stride) + num_rows * KEY_TILE +
                             2 * KEY_TILE * rows.width);
        keys = queries + all_rows * width;
        values = keys + KEY_TILE * rows.width;
        scores = values + KEY_TILE * rows.width;
        sums = scores + num_rows * KEY_TILE;
        joined = sums + all_rows * rows.stride;
    }

    // The first row of a head that sees any key from this position on.
    int64_t first_row(int64_t key) const {
        return key <= tile.position ? 0 : (key - tile.position) * group;
    }

    // A row of one of the unit's heads in `sums` or `joined`.
    float* row_of(float* all_sums, int64_t head, int64_t row) const {
        return all_sums + ((head - unit.head_begin) * num_rows + row) * rows.stride;
    }

    float* partial_row(int64_t head, int64_t split, int64_t row) const {
        int64_t place = tile.partial + (head * tile.num_splits + split) * num_rows + row;
        return job.partials + place * rows.stride;
    }

    void load_queries() const {
        float scale = LOG2_E / __builtin_sqrtf(static_cast<float>(width));
        float* to = queries;
        for (int64_t head = unit.head_begin; head < unit.head_end; head++)
            for (int64_t row = 0; row < num_rows; row++, to += width) {
                int64_t token = tile.first_row + row / group;
                const float* from =
                    job.q + token * job.q_stride + (head * group + row % group) * width;
                for (int64_t d = 0; d < width; d++) to[d] = from[d] * scale;
            }
    }

    // One past the last key of a split that a tile of queries sees.
    static int64_t end_of(const Tile& of, int64_t split) {
        int64_t end = of.position + of.num_tokens, split_end = (split + 1) * SPLIT_KEYS;
        return end < split_end ? end : split_end;
    }

    Keys locate(const Unit& of, int64_t split, int64_t key) const {
        const Tile& queries_of = plan.tiles[of.tile];
        int64_t end = end_of(queries_of, split);
        Keys keys_at;
        keys_at.count = static_cast<int>(end - key < KEY_TILE ? end - key : KEY_TILE);
        keys_at.num_heads = of.head_end - of.head_begin;
        const int64_t* block = plan.blocks + queries_of.table + key / plan.block_size;
        int64_t slot = key % plan.block_size;
        for (int k = 0; k < keys_at.count; k++) {
            int64_t row = (*block * plan.block_size + slot) * kv_heads + of.head_begin;
            keys_at.places[k] = row * cached;
            if (++slot == plan.block_size) {
                slot = 0;
                block++;
            }
        }
        return keys_at;
    }

    // What is most likely read after a key tile: of this split, the next one, or the next unit's.
    Keys locate_next(int64_t split, int64_t key) const {
        if (key + KEY_TILE < end_of(tile, split)) return locate(unit, split, key + KEY_TILE);
        if (split + 1 < unit.end) return locate(unit, split + 1, (split + 1) * SPLIT_KEYS);
        const Unit* next = &unit + 1;
        if (next < plan.units + plan.num_units) return locate(*next, next->begin, next->begin * SPLIT_KEYS);
        return {};
    }

    // The sums over one split of every row that sees it.
    void attend_split(int64_t split) const {
        int64_t begin = split * SPLIT_KEYS, end = end_of(tile, split);
        for (int64_t head = unit.head_begin; head < unit.head_end; head++)
            for (int64_t row = first_row(begin); row < num_rows; row++) {
                float* to = row_of(sums, head, row);
                for (int64_t d = 0; d < rows.width; d += LANES) store(to + d, all(0.0f));
                rows.best(to) = -__builtin_inff();
                rows.total(to) = 0.0f;
            }
        Keys now = locate(unit, split, begin);
        for (int64_t key = begin; key < end; key += KEY_TILE) {
            Keys next = locate_next(split, key);
            for (int64_t head = unit.head_begin; head < unit.head_end; head++)
                attend_keys(head, key, now, next);
            now = next;
        }
    }

    // Ask for one of the next keys and its values: of the lines that they take the share of a head.
    // Always inlined: a compiler leaves out calls of a function that changes nothing.
    __attribute__((always_inline)) void prefetch(const Keys& next, int k, int64_t head) const {
        if (k >= next.count) return;
        int64_t bytes = next.num_heads * cached * static_cast<int64_t>(sizeof(T));
        for (const void* cache : {job.cache.keys, job.cache.values}) {
            auto* row = reinterpret_cast<const char*>(static_cast<const T*>(cache) + next.places[k]);
            for (int64_t b = head * CACHE_LINE; b < bytes; b += num_heads * CACHE_LINE)
                __builtin_prefetch(row + b, 0, SECOND_CACHE);
        }
    }

    void attend_keys(int64_t head, int64_t key, const Keys& now, const Keys& next) const {
        const int64_t* places = now.places;
        int num_keys = now.count;
        int64_t offset = (head - unit.head_begin) * cached;
        const T* k_rows[KEY_TILE];
        for (int k = 0; k < num_keys; k++)
            k_rows[k] = static_cast<const T*>(job.cache.keys) + places[k] + offset;
        transpose_keys(k_rows, num_keys, width, keys);

        int64_t first = first_row(key), count = num_rows - first;
        score_keys(queries + ((head - unit.head_begin) * num_rows + first) * width, width, keys,
                   num_keys, scores + first * KEY_TILE, static_cast<int>(count));
        for (int64_t row = first; row < num_rows; row++)
            weigh(scores + row * KEY_TILE, row_of(sums, head, row),
                  static_cast<int>(tile.position + row / group - key + 1), num_keys);

        const float* v_rows[KEY_TILE];
        // What comes next is asked for a few lines at a time, with work in between: a processor has
        // only so many requests to memory in flight.
        for (int k = 0; k < num_keys; k++) {
            prefetch(next, k, head - unit.head_begin);
            v_rows[k] = value_row(static_cast<const T*>(job.cache.values) + places[k] + offset, k);
        }
        for (int k = num_keys; k < next.count; k++) prefetch(next, k, head - unit.head_begin);
        add_values(scores + first * KEY_TILE, v_rows, num_keys, row_of(sums, head, first),
                   rows.stride, static_cast<int>(count), static_cast<int>(rows.width / LANES));
    }

    // Scores of a row become weights; what it has so far is scaled to the new best score.
    void weigh(float* score, float* sum_row, int num_seen, int num_keys) const {
        int num_lanes = (num_keys + LANES - 1) / LANES;
        Lanes hidden = all(-__builtin_inff()), most = hidden;
        for (int n = 0; n < num_lanes; n++) {
            int seen = num_seen - n * LANES;
            Lanes s = load(score + n * LANES);
            if (seen < LANES) {
                s = keep_first(s, seen < 0 ? 0 : seen, hidden);
                store(score + n * LANES, s);
            }
            most = max(most, s);
        }
        float before = rows.best(sum_row), best = max_of(most);
        if (!(best > before)) best = before;
        Lanes weights = all(0.0f);
        for (int n = 0; n < num_lanes; n++) {
            Lanes w = exp2(load(score + n * LANES) - all(best));
            store(score + n * LANES, w);
            weights = weights + w;
        }
        float total = rows.total(sum_row);
        if (best > before) {
            Lanes scale = exp2(all(before - best));
            for (int64_t d = 0; d < rows.width; d += LANES)
                store(sum_row + d, load(sum_row + d) * scale);
            float factor[LANES];
            store(factor, scale);
            total = total * factor[0];
            rows.best(sum_row) = best;
        }
        rows.total(sum_row) = total + sum(weights);
    }

    // Values in float32 and in whole lanes: where they lie, if they are so.
    const float* value_row(const float* from, int k) const {
        return width == rows.width ? from : copied_value_row(from, k);
    }
    template <class Narrow>
    const float* value_row(const Narrow* from, int k) const {
        return copied_value_row(from, k);
    }
    const float* copied_value_row(const T* from, int k) const {
        float* to = values + k * rows.width;
        for (int64_t d = 0; d < width; d += LANES) {
            Lanes value = load_up_to(from + d, static_cast<int>(width - d));
            if (HAS_SCALES<T>) value = value * all(scale_of(from, width, d));
            store(to + d, value);
        }
        return to;
    }

    void run() const {
        load_queries();
        for (int64_t split = unit.begin; split < unit.end; split++) {
            attend_split(split);
            int64_t first = first_row(split * SPLIT_KEYS);
            for (int64_t head = unit.head_begin; head < unit.head_end; head++) {
                size_t bytes = (num_rows - first) * rows.stride * sizeof(float);
                if (tile.partial >= 0)
                    std::memcpy(partial_row(head, split, first), row_of(sums, head, first), bytes);
                else if (split == 0)
                    std::memcpy(row_of(joined, head, 0), row_of(sums, head, 0), bytes);
                else
                    join(head, first, row_of(sums, head, first));
            }
        }
        for (int64_t head = unit.head_begin; head < unit.head_end; head++) {
            if (tile.partial >= 0) {
                if (!is_last(head)) continue;
                std::memcpy(row_of(joined, head, 0), partial_row(head, 0, 0),
                            num_rows * rows.stride * sizeof(float));
                for (int64_t split = 1; split < tile.num_splits; split++) {
                    int64_t first = first_row(split * SPLIT_KEYS);
                    join(head, first, partial_row(head, split, first));
                }
            }
            write(head);
        }
    }

    // Take a further split into the rows of a head, from the first one that sees it.
    void join(int64_t head, int64_t first, float* next) const {
        for (int64_t row = first; row < num_rows; row++, next += rows.stride)
            rows.join(row_of(joined, head, row), next);
    }

    // Whether this unit was the last to come so far with this head of the tile.
    bool is_last(int64_t head) const {
        int64_t* done = plan.num_done + unit.tile * kv_heads + head;
        int64_t now = __atomic_add_fetch(done, unit.end - unit.begin, __ATOMIC_ACQ_REL);
        if (now < tile.num_splits) return false;
        __atomic_store_n(done, 0, __ATOMIC_RELAXED);  // for the next layer
        return true;
    }

    void write(int64_t head) const {
        for (int64_t row = 0; row < num_rows; row++) {
            int64_t token = tile.first_row + row / group;
            float* to = job.out + (token * heads + head * group + row % group) * width;
            float* from = row_of(joined, head, row);
            Lanes total = all(rows.total(from));
            int64_t d = 0;
            for (; d + LANES <= width; d += LANES) store(to + d, load(from + d) / total);
            if (d < width) store_first(to + d, load(from + d) / total, static_cast<int>(width - d));
        }
    }
};

}  // namespace

void attend(const AttentionJob& job, int64_t unit) {
    if (job.cache.type == CACHE_INT8)
        Attention<int8_t>(job, job.plan.units[unit]).run();
    else if (job.cache.type == CACHE_BF16)
        Attention<bf16>(job, job.plan.units[unit]).run();
    else
        Attention<float>(job, job.plan.units[unit]).run();
}

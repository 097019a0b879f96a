// Paged attention where the pages lie. What a row's result is made of depends on its own query and
// on the keys it sees, by their absolute positions, and on nothing else:
//
//     split      SPLIT_KEYS keys from a multiple of that position; a row's sums over one begin anew
//     key tile   KEY_TILE keys of a split; softmax is kept up from one to the next
//     join       the splits of a row, one after the other
//
// Hidden keys weigh exactly zero. Tiles of queries, units of work and threads only say who computes
// a row when, and with which others.
#pragma once

#include <cstdlib>

#include "gemm.h"
#include "kernels.h"
#include "transpose.h"

namespace {

// A thread's own memory, for one tile at a time; grows and stays.
struct Scratch {
    float* memory = nullptr;
    size_t size = 0;

    float* of(size_t wanted) {
        if (wanted > size) {
            std::free(memory);
            size = 0;
            void* given = nullptr;
            if (posix_memalign(&given, 64, wanted * sizeof(float)) != 0) std::abort();
            memory = static_cast<float*>(given);
            size = wanted;
        }
        return memory;
    }
    ~Scratch() { std::free(memory); }
};

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

template <class T>
struct Attention {
    const AttentionJob& job;
    const Tile& tile;
    int64_t head;  // of keys and values
    int64_t group = job.heads / job.kv_heads;
    int64_t num_rows = tile.num_tokens * group;
    Rows rows = {(job.head_dim + LANES - 1) / LANES * LANES, 0};
    float *queries = nullptr, *keys = nullptr, *values = nullptr, *scores = nullptr;
    float *sums = nullptr, *joined = nullptr;

    Attention(const AttentionJob& job_, const Tile& tile_, int64_t head_)
        : job(job_), tile(tile_), head(head_) {
        rows.stride = rows.width + PARTIAL_EXTRA;
        size_t per_row = job.head_dim + KEY_TILE + 2 * rows.stride;
        queries = scratch.of(num_rows * per_row + 2 * KEY_TILE * rows.width);
        keys = queries + num_rows * job.head_dim;
        values = keys + KEY_TILE * rows.width;
        scores = values + KEY_TILE * rows.width;
        sums = scores + num_rows * KEY_TILE;
        joined = sums + num_rows * rows.stride;
    }

    int64_t end() const { return tile.position + tile.num_tokens; }
    // The first row that sees any key from this position on.
    int64_t first_row(int64_t key) const {
        return key <= tile.position ? 0 : (key - tile.position) * group;
    }
    float* partial(int64_t split) const {
        int64_t row = tile.partial + (head * tile.num_splits + split) * num_rows;
        return job.partials + row * rows.stride;
    }

    void load_queries() const {
        float scale = LOG2_E / __builtin_sqrtf(static_cast<float>(job.head_dim));
        const T* q = static_cast<const T*>(job.q);
        for (int64_t row = 0; row < num_rows; row++) {
            int64_t token = tile.first_row + row / group;
            const T* from = q + token * job.q_stride + (head * group + row % group) * job.head_dim;
            for (int64_t d = 0; d < job.head_dim; d++)
                queries[row * job.head_dim + d] = to_float(from[d]) * scale;
        }
    }

    const T* slot(const void* cache, int64_t position) const {
        int64_t block = job.blocks[tile.table + position / job.block_size];
        int64_t row = (block * job.block_size + position % job.block_size) * job.kv_heads + head;
        return static_cast<const T*>(cache) + row * job.head_dim;
    }

    // The sums over one split of every row that sees it.
    void attend_split(int64_t split) const {
        int64_t begin = split * SPLIT_KEYS;
        int64_t last = begin + SPLIT_KEYS < end() ? begin + SPLIT_KEYS : end();
        for (int64_t row = first_row(begin); row < num_rows; row++) {
            float* to = sums + row * rows.stride;
            for (int64_t d = 0; d < rows.width; d += LANES) store(to + d, all(0.0f));
            rows.best(to) = -__builtin_inff();
            rows.total(to) = 0.0f;
        }
        for (int64_t key = begin; key < last; key += KEY_TILE)
            attend_keys(key, static_cast<int>(last - key < KEY_TILE ? last - key : KEY_TILE), last);
    }

    void attend_keys(int64_t key, int num_keys, int64_t prefetch_end) const {
        const T* places[KEY_TILE];
        for (int k = 0; k < num_keys; k++) places[k] = slot(job.k_cache, key + k);
        prefetch(key + KEY_TILE, prefetch_end);
        transpose_keys(places, num_keys, job.head_dim, keys);
        int64_t first = first_row(key), count = num_rows - first;
        const float* transposed = keys;
        gemm<false>(
            queries + first * job.head_dim, job.head_dim,
            [=](int i) INLINE_LAMBDA { return transposed + i * KEY_TILE; },
            static_cast<int>(job.head_dim), scores + first * KEY_TILE, KEY_TILE,
            static_cast<int>(count), (num_keys + LANES - 1) / LANES);
        for (int64_t row = first; row < num_rows; row++)
            weigh(row, static_cast<int>(tile.position + row / group - key + 1), num_keys);
        add_values(key, num_keys, first, count);
    }

    void prefetch(int64_t key, int64_t prefetch_end) const {
        int64_t bytes = job.head_dim * static_cast<int64_t>(sizeof(T));
        for (int k = 0; k < KEY_TILE && key + k < prefetch_end; k++) {
            auto* k_row = reinterpret_cast<const char*>(slot(job.k_cache, key + k));
            auto* v_row = reinterpret_cast<const char*>(slot(job.v_cache, key + k));
            for (int64_t b = 0; b < bytes; b += 64) {
                __builtin_prefetch(k_row + b);
                __builtin_prefetch(v_row + b);
            }
        }
    }

    // Scores of a row become weights; what it has so far is scaled to the new best score.
    void weigh(int64_t row, int num_seen, int num_keys) const {
        float *score = scores + row * KEY_TILE, *sum_row = sums + row * rows.stride;
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

    void add_values(int64_t key, int num_keys, int64_t first, int64_t count) const {
        const float* places[KEY_TILE];
        for (int k = 0; k < num_keys; k++) places[k] = value_row(slot(job.v_cache, key + k), k);
        const float* const* from = places;
        gemm<true>(
            scores + first * KEY_TILE, KEY_TILE, [=](int i) INLINE_LAMBDA { return from[i]; },
            num_keys, sums + first * rows.stride, rows.stride, static_cast<int>(count),
            static_cast<int>(rows.width / LANES));
    }

    // Values in float32 and in whole lanes: where they lie, if they are so.
    const float* value_row(const float* from, int k) const {
        return job.head_dim == rows.width ? from : copied_value_row(from, k);
    }
    const float* value_row(const bf16* from, int k) const { return copied_value_row(from, k); }
    const float* copied_value_row(const T* from, int k) const {
        float* to = values + k * rows.width;
        int64_t d = 0;
        for (; d + LANES <= job.head_dim; d += LANES) store(to + d, load(from + d));
        if (d < job.head_dim)
            store(to + d, load_first(from + d, static_cast<int>(job.head_dim - d)));
        return to;
    }

    void run(const Unit& unit) const {
        load_queries();
        for (int64_t split = unit.begin; split < unit.end; split++) {
            attend_split(split);
            int64_t first = first_row(split * SPLIT_KEYS);
            if (tile.partial >= 0) {
                std::memcpy(partial(split) + first * rows.stride, sums + first * rows.stride,
                            (num_rows - first) * rows.stride * sizeof(float));
            } else if (split == 0) {
                std::memcpy(joined, sums, num_rows * rows.stride * sizeof(float));
            } else {
                join_split(split, sums);
            }
        }
        if (tile.partial < 0) {
            write();
        } else if (is_last(unit.end - unit.begin)) {
            std::memcpy(joined, partial(0), num_rows * rows.stride * sizeof(float));
            for (int64_t split = 1; split < tile.num_splits; split++)
                join_split(split, partial(split));
            write();
        }
    }

    void join_split(int64_t split, float* next) const {
        for (int64_t row = first_row(split * SPLIT_KEYS); row < num_rows; row++)
            rows.join(joined + row * rows.stride, next + row * rows.stride);
    }

    // Whether this unit, with so many splits, was the last of its tile to come so far.
    bool is_last(int64_t num_splits) const {
        int64_t* done = job.num_done + (&tile - job.tiles) * job.kv_heads + head;
        if (__atomic_add_fetch(done, num_splits, __ATOMIC_ACQ_REL) < tile.num_splits) return false;
        __atomic_store_n(done, 0, __ATOMIC_RELAXED);  // for the next layer
        return true;
    }

    void write() const {
        T* out = static_cast<T*>(job.out);
        for (int64_t row = 0; row < num_rows; row++) {
            int64_t token = tile.first_row + row / group;
            T* to = out + (token * job.heads + head * group + row % group) * job.head_dim;
            float* from = joined + row * rows.stride;
            Lanes total = all(rows.total(from));
            int64_t d = 0;
            for (; d + LANES <= job.head_dim; d += LANES) store(to + d, load(from + d) / total);
            if (d < job.head_dim)
                store_first(to + d, load(from + d) / total, static_cast<int>(job.head_dim - d));
        }
    }
};

template <class T>
void attend_unit(const void* given, int64_t index) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(given);
    // Heads of a position lie next to each other: threads that are at it together share its pages.
    const Unit& unit = job.units[index / job.kv_heads];
    Attention<T>(job, job.tiles[unit.tile], index % job.kv_heads).run(unit);
}

}  // namespace

// What Python calls, and what each instruction set provides.
#pragma once

#include <cstdint>

// Some query tokens of one sequence, with all heads of a KV head's group: the rows of the products.
struct Tile {
    int64_t first_row;   // of q, the first token's
    int64_t num_tokens;
    int64_t position;    // absolute, of the first token
    int64_t table;       // where the sequence's block table begins in `blocks`
    int64_t num_splits;  // of the keys that the last token sees
    int64_t partial;     // of the tile's first partial row, or -1 if units have all of its splits
};

// A tile, some of its splits of the keys, [begin, end), and some KV heads.
struct Unit {
    int64_t tile, begin, end, head_begin, head_end;
};

struct AttentionJob {
    const void *q, *k_cache, *v_cache;
    void* out;                 // [num_rows, heads, head_dim], contiguous
    const Tile* tiles;
    const Unit* units;
    const int64_t* blocks;     // the sequences' block tables, one after the other
    float* partials;
    int64_t* num_done;         // splits of each (tile, KV head); all zero before and after
    int64_t q_stride;          // values from a token of q to the next
    int64_t num_units, num_tokens, num_rows, heads, kv_heads, head_dim, block_size;
    int64_t num_threads, is_bf16;
};

// Rows of x stand `stride` apart and hold `parts` parts of `width` values next to each other.
struct NormJob {
    const void* x;
    const float* weight;  // [parts, width]
    void* out;            // contiguous
    int64_t stride, num_rows, parts, width, num_threads, is_bf16;
    float eps;
};

struct SiluJob {
    const void* gate_up;  // [num_rows, 2 * width]
    void* out;            // [num_rows, width]
    int64_t num_rows, width, num_threads, is_bf16;
};

// Rotates queries and keys, returns the queries and puts keys and values into the cache.
struct RotaryJob {
    const void *queries_keys, *values;
    const float *cos, *signed_sin;  // [num_rows, head_dim]
    void *q, *k_cache, *v_cache;    // q contiguous
    const int64_t* slots;           // [num_tokens]
    int64_t qk_stride, v_stride;    // values from a row to the next
    int64_t num_tokens, num_rows, heads, kv_heads, head_dim, num_threads, is_bf16;
};

enum WeightType : int64_t { WEIGHT_FLOAT32, WEIGHT_BF16, WEIGHT_INT8 };

// x @ weight + bias. The weight is [strips, num_in, STRIP], or [strips, groups] of WeightGroup, and
// has columns beyond num_out in its last strip.
struct LinearJob {
    const void *x, *weight;  // x [num_rows, num_in], contiguous
    const float* bias;       // [num_out], or null
    void* out;               // [num_rows, num_out], of the type of x
    int64_t num_rows, num_in, num_out, num_threads, x_is_bf16, weight_type;
};

// A checkpoint's matrix [num_out, num_in], float32 or bfloat16, to what LinearJob has as weight: of
// the same numbers, or of int8.
struct PackJob {
    const void* weight;
    void* strips;
    int64_t num_in, num_out, is_bf16, weight_type;
};

void pack(const PackJob& job);

struct Kernels {
    const char* name;
    void (*linear)(const LinearJob*);
    void (*attention)(const AttentionJob*);
    void (*norm)(const NormJob*);
    void (*silu)(const SiluJob*);
    void (*rotary)(const RotaryJob*);
};

constexpr int64_t STRIP = 32;  // columns of a weight
constexpr int64_t GROUP = 32;  // inputs with a scale of their own, in int8
constexpr int64_t SPLIT_KEYS = 256;  // a split of the keys begins at each multiple of this position
constexpr int64_t PARTIAL_EXTRA = 16;  // floats of a partial row beside the values

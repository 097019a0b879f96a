// What Python calls, and what each instruction set provides. Activations are float32 everywhere.
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

// Everything about the attention of a step that is the same in every layer.
struct AttentionPlan {
    const Tile* tiles;
    const Unit* units;
    const int64_t* blocks;  // the sequences' block tables, one after the other
    int64_t* num_done;      // splits of each (tile, KV head); all zero before and after
    int64_t num_units, num_partials, block_size;
};

struct AttentionShape {
    int64_t heads, kv_heads, head_dim;
};

enum CacheType : int64_t { CACHE_FLOAT32, CACHE_BF16, CACHE_INT8 };

// [blocks, block_size, kv_heads, row] of one layer; a row is what cache_rows.h says.
struct Cache {
    void *keys, *values;
    int64_t type;
};

struct AttentionJob {
    AttentionPlan plan;
    AttentionShape shape;
    Cache cache;
    const float* q;
    float* out;        // [num_rows, heads, head_dim], contiguous
    float* partials;
    int64_t q_stride;  // values from a token of q to the next
    int64_t num_threads;
};

// Rows of x hold `parts` parts of `width` values next to each other.
struct NormJob {
    const float* x;
    const float* weight;  // [parts, width]
    float* out;
    int64_t num_rows, parts, width, num_threads;
    float eps;
};

struct SiluJob {
    const float* gate_up;  // [num_rows, 2 * width]
    float* out;            // [num_rows, width]
    int64_t num_rows, width, num_threads;
};

// Rotates queries and keys in place and puts keys and values into the cache.
struct RotaryJob {
    AttentionShape shape;
    Cache cache;
    float* qkv;                     // [num_rows, heads + 2 * kv_heads, head_dim]
    const float *cos, *signed_sin;  // [positions, head_dim]
    const int64_t *positions, *slots;  // [num_rows]
    int64_t num_rows, num_threads;
};

enum WeightType : int64_t { WEIGHT_FLOAT32, WEIGHT_BF16, WEIGHT_INT8, WEIGHT_INT4 };

// A matrix [num_in, num_out] and a bias. It lies as [strips, num_in, STRIP], or [strips, groups] of
// WeightGroup or NibbleGroup, and has columns beyond num_out in its last strip.
struct Weight {
    const void* data;
    const float* bias;  // [num_out], or null
    int64_t type, num_in, num_out;
};

struct LinearJob {
    Weight weight;
    const float* x;  // [num_rows, num_in]
    float* out;      // [num_rows, num_out]
    int64_t num_rows, num_threads;
};

struct DecoderLayer {
    const float *attention_norm, *mlp_norm;  // [hidden]
    const float* query_key_norm;             // [heads + kv_heads, head_dim], or null
    Weight qkv, attention_out, gate_up, down;
};

struct Decoder {
    const DecoderLayer* layers;
    const void* table;       // of embeddings, [vocab, hidden], or null: it is the head
    const float* final_norm;
    Weight head;
    const float *cos, *signed_sin;  // [positions, head_dim]
    AttentionShape shape;
    int64_t num_layers, hidden, table_is_bf16;
    float eps;
};

struct StepJob {
    const Decoder* decoder;
    const Cache* caches;                                  // of each layer
    const int64_t *token_ids, *positions, *slots;         // [num_rows]
    const int64_t* logit_rows;                            // [num_logits]
    float* logits;                                        // [num_logits, vocab]
    AttentionPlan attention;
    int64_t num_rows, num_logits, num_threads;
};

// A checkpoint's matrix [num_out, num_in], float32 or bfloat16, to what LinearJob has as weight: of
// the same numbers, or of int8 or int4.
struct PackJob {
    const void* weight;
    void* strips;
    int64_t num_in, num_out, is_bf16, weight_type, only_exact;
};

// With only_exact, of int4, false as soon as a weight would not come out as it was: then the strips
// are not whole.
bool pack(const PackJob& job);

// One sequence's rows of logits, at positions from `position` on, and how a token is chosen.
struct Choice {
    const float* logits;  // [num_rows], rows `stride` apart
    int64_t* tokens;      // [num_rows], the expected ones; the chosen ones take their places
    int64_t num_rows, num_chosen, stride, num_ids, position, top_k;
    uint64_t seed;
    double temperature, top_p, min_p;
};

struct ChooseJob {
    Choice* choices;
    int64_t num_choices, num_threads;
};

struct Kernels {
    const char* name;
    void (*linear)(const LinearJob*);
    void (*attention)(const AttentionJob*);
    void (*norm)(const NormJob*);
    void (*silu)(const SiluJob*);
    void (*rotary)(const RotaryJob*);
    void (*step)(const StepJob*);
    void (*choose)(const ChooseJob*);
};

// Those of the library's instruction set.
extern const Kernels kernels;

constexpr int64_t STRIP = 32;  // columns of a weight
constexpr int64_t GROUP = 32;  // inputs with a scale of their own, in int8 and int4
constexpr int64_t KV_GROUP = 32;  // values of a head with a scale of their own, in an int8 cache
constexpr int64_t SPLIT_KEYS = 256;  // a split of the keys begins at each multiple of this position
constexpr int64_t PARTIAL_EXTRA = 16;  // floats of a partial row beside the values

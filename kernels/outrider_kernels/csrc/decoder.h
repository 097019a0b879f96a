// A step of a whole decoder: every member of a team goes through this, and meets the others after
// each phase. What a row becomes is its own matter, whoever computes it and beside which others.
#pragma once

#include <initializer_list>

#include "product.h"
#include "scratch.h"
#include "team.h"
#include "units.h"

namespace {

// What is between the operations, for all rows; shared by the team.
struct Workspace {
    float *hidden, *qkv, *attended, *partials;
    // Inputs of the products with `hidden` inputs or heads, and of the last one of a layer. Their
    // rows are as long as the weight at hand takes them: weights may be of several types.
    char *x, *inner;
};

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t floats_of_partials(const AttentionPlan& plan, const AttentionShape& shape) {
    return plan.num_partials * ((shape.head_dim + LANES - 1) / LANES * LANES + PARTIAL_EXTRA);
}

Workspace workspace_of(const StepJob& step, Scratch& scratch) {
    const Decoder& decoder = *step.decoder;
    const AttentionShape& shape = decoder.shape;
    Workspace space = {};
    int64_t x_stride = input_stride(decoder.head), inner_stride = 0;
    for (int64_t i = 0; i < decoder.num_layers; i++) {
        const DecoderLayer& layer = decoder.layers[i];
        for (const Weight* weight : {&layer.qkv, &layer.attention_out, &layer.gate_up})
            x_stride = larger(x_stride, input_stride(*weight));
        inner_stride = larger(inner_stride, input_stride(layer.down));
    }
    int64_t most_rows = larger(step.num_rows, step.num_logits);
    int64_t hidden = step.num_rows * decoder.hidden;
    int64_t qkv = step.num_rows * (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    int64_t attended = step.num_rows * shape.heads * shape.head_dim;
    int64_t partials = floats_of_partials(step.attention, shape);
    int64_t x = most_rows * x_stride, inner = step.num_rows * inner_stride;
    // Strides are multiples of 4 bytes.
    int64_t floats = hidden + qkv + attended + partials + (x + inner) / 4;
    space.hidden = scratch.of(floats);
    space.qkv = space.hidden + hidden;
    space.attended = space.qkv + qkv;
    space.partials = space.attended + attended;
    space.x = reinterpret_cast<char*>(space.partials + partials);
    space.inner = space.x + x;
    return space;
}

thread_local Scratch normed_row;

// One member's way through a step.
struct Pass {
    const StepJob& step;
    const Workspace& space;
    const Member& member;
    const Decoder& decoder = *step.decoder;
    const AttentionShape& shape = decoder.shape;

    static Inputs inputs_of(const Weight& weight, char* rows) { return {rows, input_stride(weight)}; }

    void embed() const {
        share(member, step.num_rows, [&](int64_t row) INLINE_LAMBDA {
            int64_t id = step.token_ids[row], width = decoder.hidden;
            float* to = space.hidden + row * width;
            if (!decoder.table)
                lookup(decoder.head, id, to);
            else if (decoder.table_is_bf16)
                copy(static_cast<const bf16*>(decoder.table) + id * width, width, to);
            else
                copy(static_cast<const float*>(decoder.table) + id * width, width, to);
        });
    }

    template <class T>
    static void copy(const T* from, int64_t width, float* to) {
        each_lanes(width, [&](int64_t i, int n) INLINE_LAMBDA {
            store_some(to + i, load_some(from + i, n), n);
        });
    }

    void norm(int64_t from_row, const float* norm, const Weight& next, int64_t row) const {
        float* values = normed_row.of(decoder.hidden);
        norm_row(space.hidden + from_row * decoder.hidden, norm, decoder.hidden, decoder.eps, values);
        put_inputs(next, values, 0, decoder.hidden, inputs_of(next, space.x), row);
    }

    void norm_all(const float* weight, const Weight& next) const {
        share(member, step.num_rows, [&](int64_t row) INLINE_LAMBDA { norm(row, weight, next, row); });
    }

    template <bool ADD>
    void product(const Weight& weight, char* rows, int64_t num_rows, float* out) const {
        Inputs x = inputs_of(weight, rows);
        share(member, num_strips(weight.num_out), [&](int64_t strip) INLINE_LAMBDA {
            product_strip<ADD>(weight, x, num_rows, strip, out);
        });
    }

    // Queries and keys become what attention wants, keys and values go to the cache.
    void place(const DecoderLayer& layer, const Cache& cache) const {
        RotaryJob job = {shape, cache, space.qkv, decoder.cos, decoder.signed_sin,
                         step.positions, step.slots, step.num_rows, 1};
        int64_t width = shape.head_dim, num_rotated = shape.heads + shape.kv_heads;
        share(member, step.num_rows, [&](int64_t row) INLINE_LAMBDA {
            float* heads = space.qkv + row * (num_rotated + shape.kv_heads) * width;
            for (int64_t i = 0; layer.query_key_norm && i < num_rotated * width; i += width)
                norm_row(heads + i, layer.query_key_norm + i, width, decoder.eps, heads + i);
            rotate(job, row);
        });
    }

    void attention(const DecoderLayer& layer, const Cache& cache) const {
        int64_t width = shape.heads * shape.head_dim;
        AttentionJob job = {step.attention, shape, cache, space.qkv, space.attended, space.partials,
                            width + 2 * shape.kv_heads * shape.head_dim, 1};
        share(member, step.attention.num_units,
              [&](int64_t unit) INLINE_LAMBDA { attend(job, unit); });
        Inputs x = inputs_of(layer.attention_out, space.x);
        share(member, step.num_rows, [&](int64_t row) INLINE_LAMBDA {
            put_inputs(layer.attention_out, space.attended + row * width, 0, width, x, row);
        });
    }

    void mlp(const DecoderLayer& layer) const {
        Inputs x = inputs_of(layer.gate_up, space.x), inner = inputs_of(layer.down, space.inner);
        share(member, num_strips(layer.down.num_in), [&](int64_t strip) INLINE_LAMBDA {
            gated_strip(layer.gate_up, x, step.num_rows, strip, layer.down, inner);
        });
        product<true>(layer.down, space.inner, step.num_rows, space.hidden);
    }

    void run() const {
        embed();
        for (int64_t i = 0; i < decoder.num_layers; i++) {
            const DecoderLayer& layer = decoder.layers[i];
            norm_all(layer.attention_norm, layer.qkv);
            product<false>(layer.qkv, space.x, step.num_rows, space.qkv);
            place(layer, step.caches[i]);
            attention(layer, step.caches[i]);
            product<true>(layer.attention_out, space.x, step.num_rows, space.hidden);
            norm_all(layer.mlp_norm, layer.gate_up);
            mlp(layer);
        }
        share(member, step.num_logits, [&](int64_t i) INLINE_LAMBDA {
            norm(step.logit_rows[i], decoder.final_norm, decoder.head, i);
        });
        product<false>(decoder.head, space.x, step.num_logits, step.logits);
    }
};

}  // namespace

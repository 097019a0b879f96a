// What the files that are compiled for an instruction set have from each other: the parts that take
// a compiler long, so that it can work on them side by side, and once each.
#pragma once

#include "kernels.h"

// Rows of a product's input, each as its weight takes it.
struct Inputs {
    char* data;
    int64_t stride;  // bytes from a row to the next

    template <class T>
    T* row(int64_t row) const {
        return reinterpret_cast<T*>(data + row * stride);
    }
};

// Sums of `count` rows from `row` on in one strip, without the bias: [count, STRIP].
void sums_of(const Weight& weight, const Inputs& x, int64_t row, int count, int64_t strip, float* sums);

// The work of one unit of the plan.
void attend(const AttentionJob& job, int64_t unit);

// One sequence's rows, as long as they give the tokens that were expected.
void choose_tokens(Choice& choice);

// sm90/steps_of_64.h: rows of the backward with a bias alone at head dim 64, whose steps have 128
// queries in most calls and 64 in the others. Steps of 128 are faster where each warpgroup has a
// tile of the bias in 16 bits (warpgroup_bias.h) or numbers of keys (key_bias.h). A tile in fp32
// does not fit, and where dS is stored (backward_grad_bias.h) or the bias is read from global
// memory, steps of 128 are slower (docs/hopper_backward.md).
#pragma once

#include "cute_attention/sm90/key_bias.h"

namespace cute_attention::sm90 {

template <class Row>
constexpr bool kHasStepsOf64 = Row::kKey.score_mods == score_mods::Bias && Row::kConfig.tile_m > 64;

// The row with steps of 64, which has kernels and launches of its own.
template <class Row>
struct StepsOf64 : Row {
  static constexpr KernelConfig kConfig = {64, Row::kConfig.tile_n, Row::kConfig.stages,
                                           Row::kConfig.warps};
};

// The row of the table that a row is made of.
template <class Row>
struct RowOfTable {
  using Type = Row;
};
template <class Row>
struct RowOfTable<StepsOf64<Row>> {
  using Type = Row;
};

// It has no kernel for numbers of keys: calls with these have steps of 128.
template <class Row>
constexpr bool kHasKeyBias<StepsOf64<Row>> = false;

}  // namespace cute_attention::sm90

namespace cute_attention {
template <class Row>
struct StudyOf<sm90::StepsOf64<Row>> : StudyOf<Row> {};
}  // namespace cute_attention

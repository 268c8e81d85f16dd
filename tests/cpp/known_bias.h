// known_bias.h: a bias whose numbers say which score they are of, and rows whose kernels read it,
// for tests of where these do. A test includes layouts/host_cuda.h before.
#pragma once

#include "cute_attention/sm90/bias_tiles.h"
#include "kernels/row.h"
#include "layouts/layout_json.h"

namespace cute_attention {
namespace rows {
CUTE_ATTENTION_FORWARD(forward_64, Sm90, Float16, 64, 64, Bias, 192, 128, 2, 16, O1)
CUTE_ATTENTION_FORWARD(forward_128, Sm90, Float16, 128, 128, Bias, 128, 128, 2, 12, O3)
CUTE_ATTENTION_FORWARD(forward_256, Sm90, BFloat16, 256, 256, Bias, 128, 64, 2, 12, O1)
CUTE_ATTENTION_BACKWARD(backward_256, Sm90, Float16, 256, 256, Bias, 128, 64, 2, 12, O3)
CUTE_ATTENTION_BACKWARD(backward_128, Sm90, Float16, 128, 128, Bias, 64, 128, 2, 12, O3)
CUTE_ATTENTION_BACKWARD(backward_64, Sm90, BFloat16, 64, 64, Bias, 128, 128, 2, 12, O3)
CUTE_ATTENTION_BACKWARD(backward_64_dropout, Sm90, BFloat16, 64, 64, Bias | Dropout, 64, 128, 2, 12,
                        O3)
}  // namespace rows

// Where in its buffer, in elements, an element of a tile of stage `stage` stands.
template <class Layout>
int place(int row, int col, int stage = 0) {
  return layouts::Swizzled<Layout>::apply(int(layouts::Linear<Layout>{}(row, col, stage)));
}

// The bias of query i, key j and head h of a group: a number for each that 16 bits hold, but that
// all heads, or all queries, share it where it is broadcast.
struct KnownBias {
  bool has_head, has_row;
  int operator()(int query, int key, int head) const {
    return (has_row ? query : 0) * 256 + key + (has_head ? head * 17 : 0);
  }
};

}  // namespace cute_attention

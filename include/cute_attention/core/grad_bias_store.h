// core/grad_bias_store.h: writes tiles of the gradient of a bias, or of the sum of a part of it;
// and adds up the parts.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/bias.h"
#include "cute_attention/core/grad_bias_tiles.h"
#include "cute_attention/core/warp.h"

namespace cute_attention {

// Of four blocks of 8 columns, each thread of the four that share a row has two columns. Gives each
// thread all columns of one block: thread i of the four those of block i.
template <class Warp>
CUTE_DEVICE void exchange_blocks(int lane, uint32_t (&pairs)[4]) {
  auto const swap = [&](int distance, uint32_t& low, uint32_t& high) {
    bool const keeps_high = lane & distance;
    uint32_t const got = Warp::shuffle_xor(keeps_high ? low : high, distance);
    (keeps_high ? low : high) = got;
  };
  swap(1, pairs[0], pairs[1]);
  swap(1, pairs[2], pairs[3]);
  swap(2, pairs[0], pairs[2]);
  swap(2, pairs[1], pairs[3]);
}

// One number of the gradient.
template <class Element>
CUTE_DEVICE void write_number(BiasTensor const& grad, int64_t index, float number) {
  if (grad.is_float) {
    static_cast<float*>(grad.data)[index] = number;
  } else {
    static_cast<Element*>(grad.data)[index] = Element(number);
  }
}

//   Traits  kTileM x kTileN, the tile; TiledMma, whose accumulators hold it, those of kStoreThreads
//   Warp    the warp that a thread exchanges with
template <class Traits, class Warp = DeviceWarp>
struct GradBiasStore {
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  // The numbers of the gradient that a tile has, and where it begins.
  struct Place {
    int64_t first;
    int32_t rows;
    int32_t cols;

    CUTE_DEVICE Place(BackwardParams const& params, ScoreBlock const& block) {
      BiasTensor const& grad = params.grad_bias;
      int32_t const m_begin = block.m_block * kTileM, n_begin = block.n_block * kTileN;
      rows = grad.row_stride == 0 ? 1 : min_of(kTileM, params.seqlen_q - m_begin);
      cols = grad.col_stride == 0 ? 1 : min_of(kTileN, params.seqlen_k - n_begin);
      first = block.batch * grad.batch_stride + block.head * grad.head_stride +
              m_begin * grad.row_stride + int64_t(n_begin) * grad.col_stride;
    }
  };

  // Writes a tile of the gradient of which nothing is summed but the tiles of scores.
  //   tile  (MMA, MMA_M, MMA_N)
  template <class Fragment>
  CUTE_DEVICE static void write(BackwardParams const& params, ScoreBlock const& block, int thread,
                                Fragment const& tile) {
    BiasTensor const& grad = params.grad_bias;
    Place const place(params, block);
    if (has_vectors(grad)) {
      write_vectors(grad, place, thread, tile);
      return;
    }
    for_each_pair(thread, tile, [&](int row, int col, float first, float second) {
      int64_t const index = place.first + row * grad.row_stride + col;
      if (row < place.rows && col < place.cols) {
        write_number<Element>(grad, index, first);
      }
      if (row < place.rows && col + 1 < place.cols) {
        write_number<Element>(grad, index + 1, second);
      }
    });
  }

  // Writes a tile of a part to its place in the workspace, (M, N).
  template <class Fragment>
  CUTE_DEVICE static void write_part(float* target, int thread, Fragment const& tile) {
    for_each_pair(thread, tile, [&](int row, int col, float first, float second) {
      *reinterpret_cast<float2*>(target + row * kTileN + col) = make_float2(first, second);
    });
  }

  // Writes what is left of a tile where keys, queries or both are summed: a column, a row or a
  // number. All kStoreThreads call it, when none reads the buffer any more.
  //   target       of a part: its place in the workspace; null where the sum is the gradient
  //   buffer       in shared memory, of SmemLayoutSum
  //   synchronize  waits until all of these threads call it
  template <class Fragment, class Buffer, class Synchronize>
  CUTE_DEVICE static void write_sums(BackwardParams const& params, ScoreBlock const& block,
                                     float* target, int thread, Fragment const& tile,
                                     Buffer& buffer, Synchronize const& synchronize) {
    using namespace cute;
    BiasTensor const& grad = params.grad_bias;
    TileShape const shape = grad_bias_shape(grad, Traits::kTile);
    Tensor sSum =  // (M, N)
        make_tensor(make_smem_ptr(buffer.data()), typename Traits::SmemLayoutSum{});
    Tensor tSum = typename Traits::TiledMma{}.get_slice(thread).partition_C(  // (MMA, MMA_M, MMA_N)
        sSum);
    CUTE_STATIC_ASSERT_V(cute::shape(tSum) == cute::shape(tile));
    copy(tile, tSum);
    synchronize();
    if (shape.n == 1) {
      if (thread < kTileM) {
        float sum = 0.f;
        for (int n = 0; n < kTileN; ++n) {
          sum += sSum(thread, n);
        }
        sSum(thread, 0) = sum;
      }
      synchronize();
    }
    if (shape.m == 1) {
      if (thread < shape.n) {
        float sum = 0.f;
        for (int m = 0; m < kTileM; ++m) {
          sum += sSum(m, thread);
        }
        sSum(0, thread) = sum;
      }
      synchronize();
    }
    Place const place(params, block);
    for (int i = thread; i < shape.m * shape.n; i += Traits::kStoreThreads) {
      int32_t const row = i / shape.n, col = i % shape.n;
      if (target != nullptr) {
        target[i] = sSum(row, col);
      } else if (row < place.rows && col < place.cols) {
        write_number<Element>(grad,
                              place.first + row * grad.row_stride + int64_t(col) * grad.col_stride,
                              sSum(row, col));
      }
    }
  }

  // Adds up the parts of one number of the gradient in the order of the parts, and writes it.
  //   index  of the number among those of all tiles, which the workspace holds once for each part
  CUTE_DEVICE static void add_parts(BackwardParams const& params, int32_t parts, int64_t index) {
    BiasTensor const& grad = params.grad_bias;
    TileShape const shape = grad_bias_shape(grad, Traits::kTile);
    BlockGrid const grid = grad_bias_grid(params, Traits::kTile);
    int32_t const numbers = shape.m * shape.n;
    int64_t const distance = grid.count() * numbers;
    if (index >= distance) {
      return;
    }
    Place const place(params, grid.block(index / numbers));
    int32_t const row = int32_t(index % numbers) / shape.n,
                  col = int32_t(index % numbers) % shape.n;
    if (row >= place.rows || col >= place.cols) {
      return;
    }
    float const* source = params.grad_bias_parts + index;
    float sum = 0.f;
#pragma unroll 8
    for (int32_t part = 0; part < parts; ++part) {
      sum += *source;
      source += distance;
    }
    write_number<Element>(
        grad, place.first + row * grad.row_stride + int64_t(col) * grad.col_stride, sum);
  }

 private:
  // The (row, column) in the tile of each number of a fragment: (ROWS, COLS).
  CUTE_DEVICE static auto coordinates(int thread) {
    using namespace cute;
    Tensor tScS = typename Traits::TiledMma{}.get_slice(thread).partition_C(  // (MMA, MMA_M, MMA_N)
        make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));
    return make_tensor(tScS.data(), rows_and_columns(tScS.layout()));  // (ROWS, COLS)
  }

  // Calls write(row, col, first, second) for each pair of adjacent columns.
  template <class Fragment, class Write>
  CUTE_DEVICE static void for_each_pair(int thread, Fragment const& tile, Write const& write) {
    using namespace cute;
    auto const cS = coordinates(thread);                                    // (ROWS, COLS)
    Tensor rS = make_tensor(tile.data(), rows_and_columns(tile.layout()));  // (ROWS, COLS)
    CUTE_UNROLL
    for (int row = 0; row < size<0>(rS); ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(rS); col += 2) {
        write(int(get<0>(cS(row, col))), int(get<1>(cS(row, col))), rS(row, col), rS(row, col + 1));
      }
    }
  }

  // Writes 16 bytes at a time, after an exchange among the threads of a row.
  template <class Fragment>
  CUTE_DEVICE static void write_vectors(BiasTensor const& grad, Place const& place, int thread,
                                        Fragment const& tile) {
    using namespace cute;
    auto const cS = coordinates(thread);                                    // (ROWS, COLS)
    Tensor rS = make_tensor(tile.data(), rows_and_columns(tile.layout()));  // (ROWS, COLS)
    static_assert(decltype(size<1>(rS))::value % 8 == 0, "four blocks of 8 columns, or more");
    CUTE_UNROLL
    for (int first = 0; first < size<1>(rS); first += 8) {
      // The columns begin with this thread's pair of the first of four blocks.
      int const col = int(get<1>(cS(0, first))) + 6 * (thread % 4);
      Element* const target = static_cast<Element*>(grad.data) + place.first + col;
      CUTE_UNROLL
      for (int i = 0; i < size<0>(rS); ++i) {
        uint32_t pairs[4];
        CUTE_UNROLL
        for (int block = 0; block < 4; ++block) {
          pairs[block] = pack<Element>(rS(i, first + 2 * block), rS(i, first + 2 * block + 1));
        }
        exchange_blocks<Warp>(Warp::lane(thread), pairs);
        int const row = int(get<0>(cS(i, 0)));
        if (row >= place.rows || col >= place.cols) {
          continue;
        }
        Element* const vector = target + row * grad.row_stride;
        if (col + 8 <= place.cols) {
          *reinterpret_cast<uint4*>(vector) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
        } else {  // the last columns of the gradient
          CUTE_UNROLL
          for (int j = 0; j < 8; ++j) {
            if (col + j < place.cols) {
              vector[j] = Element::bitcast(uint16_t(pairs[j / 2] >> (16 * (j % 2))));
            }
          }
        }
      }
    }
  }
};

}  // namespace cute_attention

// sm90/forward_scores.h: the scores of a consumer warpgroup's 64 queries, and their softmax.
#pragma once

#include "cute_attention/core/capped_softmax.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/online_softmax.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/score_mod.h"
#include "cute_attention/core/straight_softmax.h"
#include "cute_attention/sm90/cached_keys.h"
#include "cute_attention/sm90/forward_store.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/forward_traits.h"

namespace cute_attention::sm90 {

template <class Row>
struct ForwardScores {
  using Traits = ForwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  static constexpr bool kDrops = has_dropout(kScoreMods);
  using Modifiers = ScoreModifiers<kScoreMods>;
  // Those that come with masks. With a bias beside K, add_bias() has applied the others.
  using LaterModifiers =
      ScoreModifiers<kScoreMods, Traits::kBiasBesideK ? score_mods::Softcap | score_mods::Bias
                                                      : score_mods::None>;

  using TileS = cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kTileN>>;
  using FragmentS = decltype(cute::partition_fragment_C(typename Traits::MmaQK{}, TileS{}));
  static constexpr bool kStraight = Traits::kStraight;
  // Whether scores are modified, and their maxima taken, before the wait for O, which this work
  // runs beside. ptxas waits as soon as it can: in rows without modifiers that is after most
  // maxima. A bias beside K is added before that wait anyhow, and rows with a map and a term
  // have no registers for it.
  static constexpr bool kModifiesFirst =
      kStraight && !Traits::kBiasBesideK && Modifiers::kHasMap != Modifiers::kHasTerm;
  // Whether the softmax applies softcap by itself.
  static constexpr bool kCapped = kStraight && kScoreMods == score_mods::Softcap;
  using Softmax =
      std::conditional_t<kCapped, CappedSoftmax<2>,
                         std::conditional_t<kStraight, StraightSoftmax<2>, OnlineSoftmax<2>>>;
  using Rows = typename Softmax::Rows;
  // How many scores share a quotient (softcap.h): fewer where the output, or the addresses of a
  // cache, leave few registers.
  static constexpr int kMapGroup = Traits::kHeadDimV > 128 || Traits::kTileM > 128 ? 1
                                   : kReadsCache<Row> ? (kCapped ? 1 : 2)
                                                      : 4;

  ForwardArguments const& arguments;
  int const warpgroup;  // of the consumers
  int const thread;     // of the warpgroup

  FragmentS accumulator;  // (MMA, MMA_M, MMA_N): S, which first() and next() modify and mask
  Softmax softmax;
  // ALiBi of rows in which the tensor cores compute it.
  std::conditional_t<Traits::kAlibiProduct, AlibiOperand<Element, kTileN>, NoAlibiOperand> alibi;
  bool all_near = true;  // of the scores of a tile with a mask, in rows with kCapped
  typename LaterModifiers::Terms::template OfRows<2> terms;
  DropoutRow dropout_row{};  // of the thread's rows; unused without dropout

  CUTE_DEVICE ForwardScores(ForwardArguments const& arguments, int warpgroup, int thread)
      : arguments(arguments),
        warpgroup(warpgroup),
        thread(thread),
        softmax(new_softmax(arguments.params)) {}

  // First row of this warpgroup in its tile.
  CUTE_DEVICE int m_offset() const { return warpgroup * kWarpgroupM; }

  // Applies the map to S, which is there, and adds the bias that lies beside K. Hidden scores are
  // in no group with others yet: each is mapped by itself.
  //   numbers  (M, N) of the CTA's tile, or (N)
  template <class Number>
  CUTE_DEVICE void add_bias(ForwardTile const& tile, Number const* numbers) {
    ForwardParams const& params = arguments.params;
    auto rS = view();
    Modifiers const modifiers(params);
    modifiers.template map<1>(rS, modifiers.all_near(rS));
    if (call_has<kScoreMods, score_mods::Bias>(params)) {
      float const per_unit =
          bias_per_unit(params, tile.sequence, Modifiers::exponent_scale(params));
      if constexpr (Traits::kKeyBias) {
        add_key_bias(numbers, opaque(thread), per_unit, accumulator);
      } else if constexpr (Traits::kFloatBias) {
        add_float_bias_tile<Traits::kTileM>(arguments.bias, reinterpret_cast<float const*>(numbers),
                                            m_offset(), opaque(thread), per_unit, accumulator);
      } else {
        add_bias_tile<BiasOfScores, Traits::kTileM>(arguments.bias, numbers, m_offset(),
                                                    opaque(thread), per_unit, accumulator);
      }
    }
  }

  // Modifies and masks S of the first KV tile of a walk, and begins its softmax. `full`: every
  // query sees every key of it.
  CUTE_DEVICE void first(ForwardTile const& tile, int32_t n_block, bool full) {
    if constexpr (LaterModifiers::kHasTerm && !Traits::kAlibiProduct) {
      load_terms(tile);
    }
    if constexpr (kDrops) {
      ForwardParams const& params = arguments.params;
      if (call_has<kScoreMods, score_mods::Dropout>(params)) {
        dropout_row = cute_attention::dropout_row(
            *params.dropout.seed, uint32_t(tile.work.batch * params.heads + tile.work.head),
            uint32_t(tile.m_begin + m_offset() + row_of_thread(thread)));
      }
    }
    modify_and_mask<true>(tile, n_block, !full);
    softmax = new_softmax(arguments.params);
  }

  // Reads what a new tile of queries needs for place().
  CUTE_DEVICE void begin(ForwardTile const& tile) {
    if constexpr (Traits::kAlibiProduct) {
      load_terms(tile);
      alibi.load(terms.slopes);
      if constexpr (Traits::kKeepsDiagonals) {
        begin_diagonals(tile);
      }
    }
  }

  // Has the product with places (alibi_product.h) ready before S of a KV tile is started.
  CUTE_DEVICE void place(ForwardTile const& tile, int32_t n_block) {
    if constexpr (Traits::kAlibiProduct) {
      if constexpr (!Traits::kKeepsDiagonals) {
        begin_diagonals(tile);
      }
      alibi.place(n_block, terms.slopes);
    }
  }

  // Modifies and masks S of a later KV tile. Without kMasked, or `masked`, every query sees every
  // key of it.
  template <bool kMasked>
  CUTE_DEVICE void next(ForwardTile const& tile, int32_t n_block, bool masked) {
    modify_and_mask<kMasked>(tile, n_block, kMasked && masked);
  }

  // Turns S of a KV tile, modified and masked, into P. Returns whether all rows of the warp have
  // usual bases, those that are numbers to compute with. Where they have not, and that was not
  // expected, P is not usable, and exponentiate_unusual() computes it. That is rare, and so has its
  // place outside of the loop over KV tiles without a mask. Rows that have no such loop, and do not
  // count unusual tiles either, do so here, and return true.
  //   kMasked                without it every query sees every key of the tile
  //   tile, n_block          where the KV tile is
  //   expects_unusual        P is usable whatever the bases are; that takes an addition a score.
  //                          Only in rows with kTellsUnusual
  //   end_output(p)          waits for the O that reads the P before this one; in rows with
  //                          kRowByRow p is one of the exponentials, and others have 0
  //   scale_output(factors)  multiplies the rows of O so far by factors (ROWS)
  template <bool kMasked, class FragmentP, class EndOutput, class ScaleOutput>
  CUTE_DEVICE bool exponentiate(ForwardTile const& tile, int32_t n_block, bool expects_unusual,
                                FragmentP& tOrP, EndOutput const& end_output,
                                ScaleOutput const& scale_output) {
    Rows factors;
    if constexpr (kCapped) {
      exponentiate_capped<kMasked>(tOrP, end_output, scale_output);
    } else if constexpr (kStraight) {
      Rows maxima = softmax.maxima(view());
      if constexpr (kModifiesFirst) {
        hold(maxima);
      }
      if constexpr (!Traits::kRowByRow) {
        end_output(0.f);
      }
      Rows bases, sums;
      if constexpr (Traits::kAlibiProduct) {
        Rows const offsets = alibi.template offsets_of_rows<Rows>();
        CUTE_UNROLL
        for (int row = 0; row < cute::size(maxima); ++row) {
          maxima(row) += offsets(row);
        }
        softmax.template raise<Traits::kFactorsByMinimum>(maxima, bases, factors);
        scale_output(factors);
        compute_p(tile, n_block, softmax.shifted(bases, offsets), tOrP, sums);
      } else if constexpr (Traits::kRowByRow) {
        softmax.template raise<Traits::kFactorsByMinimum>(maxima, bases, factors);
        compute_rows_of_p(bases, tOrP, sums, [&](float probability) {
          end_output(probability);
          scale_output(factors);
        });
      } else {
        softmax.template raise<Traits::kFactorsByMinimum>(maxima, bases, factors);
        scale_output(factors);
        Rows lowered = bases;
        if (expects_unusual) {
          softmax.lower(view(), lowered);
        }
        compute_p(tile, n_block, lowered, tOrP, sums);
      }
      bool const unusual = softmax.any_unusual(bases);
      if (__builtin_expect(unusual, false)) {
        if constexpr (Traits::kUnmaskedLoop) {
          return false;
        } else if constexpr (!Traits::kTellsUnusual) {
          exponentiate_unusual(tile, n_block, tOrP);
          return true;
        } else if (!expects_unusual) {
          return false;
        }
      }
      softmax.add(sums);
      return !Traits::kTellsUnusual || !unusual;
    } else {
      bool rescale;
      if constexpr (Traits::kAlibiProduct) {
        rescale = softmax.template take<kMasked>(view(), factors, NothingToCombine{},
                                                 alibi.template offsets_of_rows<Rows>());
      } else {
        rescale = softmax.template take<kMasked>(view(), factors);
      }
      end_output(0.f);
      convert_into(accumulator, tOrP);
      if (__builtin_expect(rescale, false)) {
        scale_output(factors);
      }
    }
    return true;
  }

  // Computes P of a KV tile where exponentiate() has made none that is usable.
  template <class FragmentP>
  CUTE_DEVICE void exponentiate_unusual(ForwardTile const& tile, int32_t n_block, FragmentP& tOrP) {
    if constexpr (kStraight && !kCapped) {
      Rows bases = softmax.bases(), sums;
      if constexpr (Traits::kAlibiProduct) {
        Rows const offsets = alibi.template offsets_of_rows<Rows>();
        softmax.lower(view(), bases, softmax.shifted(bases, offsets), offsets);
      } else {
        softmax.lower(view(), bases);
      }
      compute_p(tile, n_block, bases, tOrP, sums);
      softmax.add(sums);
    }
  }

  // Clears the dropped probabilities of a KV tile, in rows where compute_p() has not.
  //   tOrP  (MMA, MMA_M, MMA_N / 16)  P in 16 bits
  template <class Operand>
  CUTE_DEVICE void drop(ForwardTile const& tile, int32_t n_block, Operand& tOrP) {
    if constexpr (kDrops && !Traits::kDropsBeside) {
      if (call_has<kScoreMods, score_mods::Dropout>(arguments.params)) {
        kept_blocks(score_tile(tile, n_block), arguments.params.dropout, dropout_row).drop(tOrP);
      }
    }
  }

 private:
  CUTE_DEVICE void begin_diagonals(ForwardTile const& tile) {
    QueryPacking const& packing = arguments.packing;
    int const to_diagonal = tile.sequence.seqlen_k - tile.sequence.seqlen_q;
    int const row = m_offset() + row_of_thread(opaque(thread));
    int const query = tile.m_begin + packing.query(m_offset());
    alibi.begin(query / kWarpgroupM * kWarpgroupM + to_diagonal,
                {tile.m_begin + packing.query(row) + to_diagonal,
                 tile.m_begin + packing.query(row + 8) + to_diagonal});
  }

  CUTE_DEVICE void load_terms(ForwardTile const& tile) {
    terms.load(arguments.params, tile.work.batch,
               heads_of_thread(arguments, tile, m_offset(), thread),
               Modifiers::exponent_scale(arguments.params));
  }

  // Computes P relative to the bases (ROWS), and this thread's sums (ROWS) of it before it is
  // rounded, and what is dropped cleared. S stays as it is.
  template <class FragmentP>
  CUTE_DEVICE void compute_p(ForwardTile const& tile, int32_t n_block, Rows const& bases,
                             FragmentP& tOrP, Rows& sums) {
    FragmentS probabilities;
    if constexpr (Traits::kDropsBeside) {
      auto const places = score_tile(tile, n_block);
      KeepTest const test(uint32_t(arguments.params.dropout.drop_count));
      softmax.exponentiate(view(), bases, rows_of(probabilities), sums, [&](int k) {
        convert_block(probabilities, k, tOrP);
        kept_block(places, test, dropout_row, k).drop(tOrP(cute::_, 0, k));
      });
    } else if constexpr (Traits::kRowByRow) {
      compute_rows_of_p(bases, tOrP, sums, [](float) {});
    } else {
      softmax.exponentiate(view(), bases, rows_of(probabilities), sums);
      convert_into(probabilities, tOrP);
    }
  }

  // compute_p() with kRowByRow.
  //   free_p(p)  is called before P is written; what it waits for runs beside the exponentials, of
  //              which p is one
  template <class FragmentP, class FreeP>
  CUTE_DEVICE void compute_rows_of_p(Rows const& bases, FragmentP& tOrP, Rows& sums,
                                     FreeP const& free_p) {
    FragmentS probabilities;
    softmax.exponentiate_rows(view(), bases, rows_of(probabilities), sums);
    free_p(rows_of(probabilities)(0, 3));
    convert_into(probabilities, tOrP);
  }

  // exponentiate() of rows with kCapped.
  template <bool kMasked, class FragmentP, class EndOutput, class ScaleOutput>
  CUTE_DEVICE void exponentiate_capped(FragmentP& tOrP, EndOutput const& end_output,
                                       ScaleOutput const& scale_output) {
    auto rS = view();
    CappedCurve const curve = softmax.curve();
    Rows maxima;
    bool near = all_near;
    if constexpr (kMasked) {
      maxima = softmax.maxima(rS);
    } else {
      near = softmax.look(curve, rS, maxima);
    }
    maxima = softmax.row_maxima(maxima);
    hold(maxima);
    end_output(0.f);
    FragmentS probabilities;
    auto rP = rows_of(probabilities);
    Rows bases, factors, sums;
    if (__builtin_expect(near, true)) {
      softmax.template raise<true>(curve, maxima, bases, factors);
      scale_output(factors);
      softmax.exponentiate_near(curve, rS, bases, rP, sums);
    } else {
      softmax.template raise<false>(curve, maxima, bases, factors);
      scale_output(factors);
      softmax.template exponentiate_far<kMapGroup, kMasked>(curve, rS, bases, rP, sums);
    }
    convert_into(probabilities, tOrP);
    softmax.add(sums);
  }

  CUTE_DEVICE static Softmax new_softmax(ForwardParams const& params) {
    if constexpr (kCapped) {
      return Softmax(params.scale, params.softcap);
    } else {
      return Softmax(Modifiers::exponent_scale(params));
    }
  }

  // Has the compiler compute numbers (ROWS) here, and not where they are used.
  CUTE_DEVICE static void hold(Rows& numbers) {
    CUTE_UNROLL
    for (int row = 0; row < cute::size(numbers); ++row) {
      numbers(row) = opaque(numbers(row));
    }
  }

  CUTE_DEVICE static auto rows_of(FragmentS& fragment) {
    return cute::make_tensor(fragment.data(), rows_and_columns(fragment.layout()));  // (ROWS, COLS)
  }
  CUTE_DEVICE auto view() { return rows_of(accumulator); }  // (ROWS, COLS)

  //   kMasked  whether the tile may be masked
  template <bool kMasked>
  CUTE_DEVICE void modify_and_mask(ForwardTile const& tile, int32_t n_block, bool masked) {
    auto rS = view();
    if constexpr (kCapped) {
      if constexpr (kMasked) {
        all_near = softmax.all_near(softmax.curve(), rS);
        if (!all_near) {
          softmax.bound_far(rS);
        }
        if (masked) {
          mask_scores_by_side(score_tile(tile, n_block));
        }
      }
      return;
    }
    cute_attention::modify_and_mask<kMapGroup>(
        LaterModifiers(arguments.params), rS, masked,
        [&] { mask_scores_by_side(score_tile(tile, n_block)); },
        [&] {
          if constexpr (Traits::kAlibiProduct) {
            if (alibi.side != 0) {
              return;
            }
          }
          LaterModifiers::Terms::template add<Element>(arguments.params, score_tile(tile, n_block),
                                                       terms);
        });
  }

  CUTE_DEVICE auto score_tile(ForwardTile const& tile, int32_t n_block) {
    QueryPacking const& packing = arguments.packing;
    return make_score_tile<kWarpgroupM, kTileN>(
        typename Traits::MmaQK{}, opaque(thread), accumulator, tile.sequence, packing,
        tile.m_begin + packing.query(m_offset()), n_block * kTileN);
  }
};

}  // namespace cute_attention::sm90

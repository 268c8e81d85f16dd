// attention.cpp: causal attention on a GPU from raw pointers and a stream, compared with the
// formula on the CPU.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cute_attention/c_api.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kSeqlen = 100;
constexpr int kHeads = 4;
constexpr int kHeadsKv = 2;
constexpr int kHeadDim = 64;
constexpr int kDevice = 0;
float const kScale = 1 / std::sqrt(float(kHeadDim));

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// [seqlen, heads, head_dim] of numbers in [-1, 1).
std::vector<__half> random_tensor(int heads, unsigned seed) {
  std::vector<__half> values(size_t(kSeqlen) * heads * kHeadDim);
  for (__half& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = __float2half(float(seed >> 8) / float(1 << 23) - 1);
  }
  return values;
}

void* to_device(std::vector<__half> const& values) {
  void* pointer = nullptr;
  check(cudaMalloc(&pointer, values.size() * sizeof(__half)));
  check(cudaMemcpy(pointer, values.data(), values.size() * sizeof(__half), cudaMemcpyHostToDevice));
  return pointer;
}

// out [head_dim] of one query of one head.
std::vector<double> formula(std::vector<__half> const& q, std::vector<__half> const& k,
                            std::vector<__half> const& v, int query, int head) {
  int const head_kv = head / (kHeads / kHeadsKv);
  std::vector<double> out(kHeadDim);
  double denominator = 0;
  for (int key = 0; key <= query; ++key) {
    size_t const kv = (size_t(key) * kHeadsKv + head_kv) * kHeadDim;
    double score = 0;
    for (int d = 0; d < kHeadDim; ++d) {
      score += double(__half2float(q[(size_t(query) * kHeads + head) * kHeadDim + d])) *
               double(__half2float(k[kv + d]));
    }
    double const weight = std::exp(score * kScale);
    denominator += weight;
    for (int d = 0; d < kHeadDim; ++d) out[d] += weight * double(__half2float(v[kv + d]));
  }
  for (double& value : out) value /= denominator;
  return out;
}

}  // namespace

int main() {
  auto const q = random_tensor(kHeads, 1);
  auto const k = random_tensor(kHeadsKv, 2);
  auto const v = random_tensor(kHeadsKv, 3);
  std::vector<__half> o(q.size());

  cudaStream_t stream;
  check(cudaSetDevice(kDevice));
  check(cudaStreamCreate(&stream));

  cute_attention::ForwardParams params{};
  params.q = to_device(q);
  params.k = to_device(k);
  params.v = to_device(v);
  check(cudaMalloc(&params.o, o.size() * sizeof(__half)));
  params.q_stride = params.o_stride = {0, kHeads * kHeadDim, kHeadDim};  // batch, row, head
  params.k_stride = params.v_stride = {0, kHeadsKv * kHeadDim, kHeadDim};
  params.batch = 1;
  params.seqlen_q = params.seqlen_k = kSeqlen;
  params.heads = kHeads;
  params.heads_kv = kHeadsKv;
  params.head_dim = params.head_dim_v = kHeadDim;
  params.scale = kScale;
  params.window_left = cute_attention::kUnbounded;
  params.window_right = 0;  // causal

  if (cute_attention_forward(&params, cute_attention::DType::Float16, cute_attention::kAnyArch,
                             kDevice, stream) != 0) {
    std::fprintf(stderr, "%s\n", cute_attention_last_error());
    return 1;
  }
  check(cudaMemcpyAsync(o.data(), params.o, o.size() * sizeof(__half), cudaMemcpyDeviceToHost,
                        stream));
  check(cudaStreamSynchronize(stream));

  double worst = 0;
  for (int query = 0; query < kSeqlen; ++query) {
    for (int head = 0; head < kHeads; ++head) {
      auto const expected = formula(q, k, v, query, head);
      for (int d = 0; d < kHeadDim; ++d) {
        double const got = double(__half2float(o[(size_t(query) * kHeads + head) * kHeadDim + d]));
        worst = std::fmax(worst, std::fabs(got - expected[d]));
      }
    }
  }
  std::printf("largest error %.2e\n", worst);
  return worst < 1e-3 ? 0 : 1;
}

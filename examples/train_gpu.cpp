// Training steps of two mixture-of-experts layers, one behind the other, on Hopper GPUs: a process
// each.
//
//   train_gpu                                            on one GPU
//   torchrun --no-python --nproc_per_node=4 train_gpu    on four, or two
//
// Any launcher will do that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Every
// process prints checksums of its share of the tokens and experts. The sorted lines of all are the
// same at any number of GPUs.
#include <cuda_runtime_api.h>
#include <uniep/uniep.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kTokens = 2048;  // of a microbatch, on all ranks together
constexpr int kLayers = 2;
constexpr int kMicrobatches = 2;
constexpr int kSteps = 3;
constexpr int kShares = 4;  // of tokens and experts that a line is printed for

void check(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

/// A tensor in device memory.
template <class T>
class Tensor {
 public:
  explicit Tensor(std::int64_t size) : size_(static_cast<std::size_t>(size)) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), std::max(bytes(), std::size_t{1})));
  }
  explicit Tensor(const std::vector<T>& values) : Tensor(static_cast<std::int64_t>(values.size())) {
    check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  ~Tensor() { cudaFree(data_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  operator std::span<T>() const { return {data_, size_}; }
  operator std::span<const T>() const { return {data_, size_}; }
  std::size_t bytes() const { return size_ * sizeof(T); }
  std::vector<T> to_host() const {
    std::vector<T> host(size_);
    check(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return host;
  }
  void zero(cudaStream_t stream) const { check(cudaMemsetAsync(data_, 0, bytes(), stream)); }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// The part [begin, begin + size) of a global tensor that every rank could make: what a token or an
/// expert is does not depend on who has it.
std::vector<uniep::bf16> part_of_random(unsigned seed, std::int64_t begin, std::int64_t size,
                                        float scale) {
  std::vector<uniep::bf16> values(static_cast<std::size_t>(size));
  std::mt19937 rng(seed);
  rng.discard(static_cast<unsigned long long>(begin));
  for (auto& v : values) {
    const float unit = static_cast<float>(rng()) / static_cast<float>(std::mt19937::max());
    v = uniep::to_bf16(scale * (2 * unit - 1));
  }
  return values;
}

/// One layer's experts on this rank, and their fp32 gradients, which microbatches add to.
struct Experts {
  Experts(const uniep::Problem& p, unsigned seed, std::int64_t first, std::int64_t count)
      : w1(part_of_random(seed, first * 2 * p.intermediate * p.hidden,
                          count * 2 * p.intermediate * p.hidden, 0.05f)),
        w2(part_of_random(seed + 1, first * p.hidden * p.intermediate,
                          count * p.hidden * p.intermediate, 0.05f)),
        dw1(count * 2 * p.intermediate * p.hidden),
        dw2(count * p.hidden * p.intermediate) {}

  Tensor<uniep::bf16> w1, w2;
  Tensor<float> dw1, dw2;
};

/// What a router chose for this rank's tokens in one layer: topk different experts each.
std::vector<std::int32_t> routing(const uniep::Problem& p, unsigned seed, std::int64_t first,
                                  std::int64_t tokens) {
  std::vector<std::int32_t> ids;
  std::mt19937 rng(seed);
  rng.discard(static_cast<unsigned long long>(first));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto start = static_cast<int>(rng() % static_cast<unsigned>(p.num_experts));
    for (int k = 0; k < p.topk; ++k) ids.push_back((start + 5 * k) % p.num_experts);
  }
  return ids;
}

/// The tensors of one microbatch, and what its forward leaves for its backward.
struct Microbatch {
  Microbatch(const uniep::Problem& p, unsigned seed, std::int64_t first, std::int64_t tokens)
      : x(part_of_random(seed, first * p.hidden, tokens * p.hidden, 1.0f)),
        middle(tokens * p.hidden),
        out(tokens * p.hidden),
        dmiddle(tokens * p.hidden),
        dx(tokens * p.hidden),
        ids{Tensor(routing(p, seed + 1, first, tokens)),
            Tensor(routing(p, seed + 2, first, tokens))},
        probs(std::vector<float>(static_cast<std::size_t>(tokens * p.topk), 0.25f)),
        dprobs(tokens * p.topk) {}

  Tensor<uniep::bf16> x, middle, out, dmiddle, dx;
  Tensor<std::int32_t> ids[kLayers];
  Tensor<float> probs, dprobs;
  std::array<uniep::Saved, kLayers> saved;
};

/// FNV-1a over the bits of the elements [begin, begin + size).
template <class T>
unsigned checksum(const std::vector<T>& values, std::int64_t begin, std::int64_t size) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data() + begin);
  std::uint32_t hash = 0x811c9dc5u;
  for (std::size_t i = 0; i < static_cast<std::size_t>(size) * sizeof(T); ++i) {
    hash = (hash ^ bytes[i]) * 0x01000193u;
  }
  return hash;
}

void train(uniep::Communicator& communicator) {
  const int ranks = communicator.size(), rank = communicator.rank();
  if (kShares % ranks != 0) throw std::runtime_error("1, 2 or 4 GPUs are accepted");
  const std::int64_t tokens = kTokens / ranks, first_token = rank * tokens;
  const uniep::Problem p{.hidden = 1024,
                         .intermediate = 512,
                         .num_experts = 32,
                         .topk = 4,
                         .max_tokens = kTokens / ranks};
  const std::int64_t local_experts = p.num_experts / ranks, first_expert = rank * local_experts;

  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  // It holds memory, but no weights: one serves all layers of a model that have this shape.
  uniep::Layer layer(p, communicator, {.cuda_stream = stream});

  std::vector<std::unique_ptr<Experts>> experts;
  for (unsigned l = 0; l < kLayers; ++l) {
    experts.push_back(std::make_unique<Experts>(p, 10 + 2 * l, first_expert, local_experts));
  }
  std::vector<std::unique_ptr<Microbatch>> batches;
  for (unsigned m = 0; m < kMicrobatches; ++m) {
    batches.push_back(std::make_unique<Microbatch>(p, 20 + 3 * m, first_token, tokens));
  }
  check(cudaDeviceSynchronize());

  for (int step = 0; step < kSteps; ++step) {
    for (const auto& e : experts) {
      e->dw1.zero(stream);
      e->dw2.zero(stream);
    }
    // Calls return when their work is on the stream: the host runs ahead of the GPU.
    for (const auto& b : batches) {
      for (std::size_t l = 0; l < kLayers; ++l) {
        const uniep::RoutingPlan plan = layer.plan(b->ids[l]);
        b->saved[l] = layer.forward(plan, {.x = l == 0 ? b->x : b->middle,
                                           .topk_probs = b->probs,
                                           .w1 = experts[l]->w1,
                                           .w2 = experts[l]->w2,
                                           .out = l == 0 ? b->middle : b->out});
      }
    }
    // The loss is |out|^2 / 2, so the gradient of out is out.
    for (const auto& b : batches) {
      for (std::size_t l = kLayers; l-- > 0;) {
        layer.backward(b->saved[l], {.dy = l == 0 ? b->dmiddle : b->out,
                                     .w1 = experts[l]->w1,
                                     .w2 = experts[l]->w2,
                                     .dx = l == 0 ? b->dx : b->dmiddle,
                                     .dprobs = b->dprobs,
                                     .dw1 = std::span<float>(experts[l]->dw1),
                                     .dw2 = std::span<float>(experts[l]->dw2)});
      }
    }
    // An optimizer would come here, on the same stream. What went wrong on any rank is thrown here.
    layer.synchronize();
  }

  const int shares = kShares / ranks;
  const auto out = batches[0]->out.to_host(), dx = batches[0]->dx.to_host();
  const auto dw1 = experts[0]->dw1.to_host(), dw2 = experts[0]->dw2.to_host();
  for (int i = 0; i < shares; ++i) {
    const auto sum = [&](const auto& values) {
      const auto size = static_cast<std::int64_t>(values.size()) / shares;
      return checksum(values, i * size, size);
    };
    std::printf("share %d of %d  out %08x  dx %08x  dw1 %08x  dw2 %08x\n", rank * shares + i,
                kShares, sum(out), sum(dx), sum(dw1), sum(dw2));
  }
  check(cudaStreamDestroy(stream));
}

}  // namespace

int main() try {
  auto communicator = uniep::Communicator::cuda_from_environment();
  train(communicator);
} catch (const std::exception& error) {
  std::fprintf(stderr, "train_gpu: %s\n", error.what());
  return 2;
}

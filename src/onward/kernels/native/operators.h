// An operator as kernels see it: tensors, attributes, threads. What is wrong with them is an error of the run.
#pragma once
#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime.h"

namespace onward {

using Index = int64_t;

constexpr Index kLine = 16;  // floats in a cache line

inline void require(bool holds, const char* otherwise) {
  if (!holds) throw std::runtime_error(otherwise);
}

template <class T>
struct Tensor {
  T* data = nullptr;
  std::vector<Index> sizes;

  Index size() const {
    Index product = 1;
    for (Index n : sizes) product *= n;
    return product;
  }
  explicit operator bool() const { return data != nullptr; }
};

// Attributes of a node.
class Attributes {
 public:
  Attributes(Api* api, const KernelInfo* info) : api_(api), info_(info) {}
  Index integer(const char* name, Index otherwise) const;
  float number(const char* name, float otherwise) const;
  std::vector<Index> integers(const char* name, std::vector<Index> otherwise) const;

 private:
  template <class Entry, class T>
  T one(const char* name, T otherwise) const;

  Api* api_;
  const KernelInfo* info_;
};

// Inputs and outputs of a node while it is computed.
class Call {
 public:
  Call(Api* api, KernelContext* context) : api_(api), context_(context) {}
  size_t input_count() const;
  size_t output_count() const;
  Tensor<const float> input(size_t index) const { return read<const float>(index); }
  Tensor<const Index> indices(size_t index) const { return read<const Index>(index); }
  Tensor<float> output(size_t index, std::vector<Index> sizes) const;

  // Calls function(i) for each i below `total`, on the threads of the session. These know nothing of exceptions: the
  // reason that one of them gives is thrown again here.
  template <class Function>
  void parallel(Index total, const Function& function) const {
    if (total <= 1) {
      for (Index i = 0; i < total; i++) function(i);
      return;
    }
    struct Job {
      const Function& function;
      std::string failure;
      std::mutex mutex;
      void fail(const char* reason) {
        const std::lock_guard<std::mutex> only(mutex);
        if (failure.empty()) failure = reason;
      }
    } job{function, {}, {}};
    auto run = [](void* data, size_t i) {
      Job& job = *static_cast<Job*>(data);
      try {
        job.function(static_cast<Index>(i));
      } catch (const std::exception& error) {
        job.fail(error.what());
      } catch (...) {
        job.fail("a kernel of onward failed");
      }
    };
    check(ParallelFor::of(api_)(context_, run, static_cast<size_t>(total), 0, &job));
    if (!job.failure.empty()) throw std::runtime_error(job.failure);
  }

 private:
  template <class T>
  Tensor<T> read(size_t index) const;
  void check(Status* status) const;

  Api* api_;
  KernelContext* context_;
};

struct Kernel {
  virtual ~Kernel() = default;
  virtual void compute(const Call& call) const = 0;
};

struct Port {
  ElementType type = kFloat;
  Presence presence = kRequired;
};

// A row of the table of operators. Kernels are made by the code for the instructions that this machine has.
struct Operator {
  const char* name;
  std::vector<Port> inputs;
  std::vector<Port> outputs;
  std::unique_ptr<Kernel> (*make)(const Attributes&);
};

template <class K>
std::unique_ptr<Kernel> make_kernel(const Attributes& attributes) {
  return std::make_unique<K>(attributes);
}

// Memory for intermediate results, kept by each thread for the next call. A later call of `scratch` ends an earlier one
// of the same slot.
float* scratch(int slot, Index count);

}  // namespace onward

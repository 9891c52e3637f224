// The functions of ONNX Runtime's C API that training needs, by their positions in OrtApi. Positions never change: the
// table only grows.
//
// With the SDK of ONNX Runtime, include onnxruntime_cxx_api.h instead and write Ort::Session, Ort::Value and so on. This
// header is for the Python wheel, which has the library without headers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ort {

struct Status;
struct Env;
struct Options;
struct RawSession;
struct RawValue;
struct Memory;
struct TensorInfo;
struct Allocator;
using Table = void* const;

struct Base {
  Table* (*get_api)(uint32_t version);
  const char* (*get_version)();
};
extern "C" const Base* OrtGetApiBase();

constexpr uint32_t kVersion = 16;  // the oldest API version with all functions below

inline Table* table() {
  static Table* const api = OrtGetApiBase()->get_api(kVersion);
  if (api == nullptr) throw std::runtime_error("ONNX Runtime is older than 1.16");
  return api;
}

template <class Signature>
Signature* entry(int position) {
  return reinterpret_cast<Signature*>(table()[position]);
}

inline void check(Status* status) {
  if (status == nullptr) return;
  std::string text = entry<const char*(const Status*)>(2)(status);
  entry<void(Status*)>(93)(status);
  throw std::runtime_error(text);
}

enum Type : int { kFloat = 1, kInt64 = 7, kDouble = 11 };

// An owned tensor.
class Tensor {
 private:
  template <class Function>
  auto with_info(Function function) const {
    TensorInfo* info = nullptr;
    check(entry<Status*(const RawValue*, TensorInfo**)>(65)(value_, &info));
    auto result = function(info);
    entry<void(TensorInfo*)>(99)(info);
    return result;
  }

 public:
  explicit Tensor(RawValue* value = nullptr) : value_(value) {}
  Tensor(Tensor&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Tensor() {
    if (value_ != nullptr) entry<void(RawValue*)>(96)(value_);
  }

  // Returns a tensor over memory of the caller, which must outlive it.
  static Tensor over(void* data, size_t bytes, const std::vector<int64_t>& shape, Type type) {
    static Memory* const memory = [] {
      Memory* cpu = nullptr;
      check(entry<Status*(int, int, Memory**)>(69)(0, 0, &cpu));
      return cpu;
    }();
    RawValue* value = nullptr;
    check(entry<Status*(const Memory*, void*, size_t, const int64_t*, size_t, int, RawValue**)>(49)(
        memory, data, bytes, shape.data(), shape.size(), type, &value));
    return Tensor(value);
  }

  void* data() const {
    void* address = nullptr;
    check(entry<Status*(RawValue*, void**)>(51)(value_, &address));
    return address;
  }

  std::vector<int64_t> shape() const {
    return with_info([](TensorInfo* info) {
      size_t rank = 0;
      check(entry<Status*(const TensorInfo*, size_t*)>(61)(info, &rank));
      std::vector<int64_t> sizes(rank);
      check(entry<Status*(const TensorInfo*, int64_t*, size_t)>(62)(info, sizes.data(), rank));
      return sizes;
    });
  }

  int type() const {
    return with_info([](TensorInfo* info) {
      int type = 0;
      check(entry<Status*(const TensorInfo*, int*)>(60)(info, &type));
      return type;
    });
  }

  RawValue* get() const { return value_; }

 private:
  RawValue* value_;
};

class Session {
 public:
  explicit Session(const std::string& path) {
    static Env* const env = [] {
      Env* created = nullptr;
      check(entry<Status*(int, const char*, Env**)>(3)(3, "train", &created));
      return created;
    }();
    Options* options = nullptr;
    check(entry<Status*(Options**)>(10)(&options));
    check(entry<Status*(Options*, int)>(24)(options, 1));  // threads
    auto* create = entry<Status*(const Env*, const char*, const Options*, RawSession**)>(7);
    Status* status = create(env, path.c_str(), options, &session_);
    entry<void(Options*)>(100)(options);
    check(status);
    inputs = names(30, 36);
    outputs = names(31, 37);
  }
  ~Session() { entry<void(RawSession*)>(95)(session_); }
  Session(const Session&) = delete;

  // Returns all outputs for inputs in the order of `inputs`.
  std::vector<Tensor> run(const std::vector<const Tensor*>& tensors) const {
    std::vector<const char*> in, out;
    for (const auto& name : inputs) in.push_back(name.c_str());
    for (const auto& name : outputs) out.push_back(name.c_str());
    std::vector<const RawValue*> values;
    for (const Tensor* tensor : tensors) values.push_back(tensor->get());
    std::vector<RawValue*> results(out.size(), nullptr);
    using Names = const char* const*;
    using Values = const RawValue* const*;
    auto* run = entry<Status*(RawSession*, const void*, Names, Values, size_t, Names, size_t, RawValue**)>(9);
    check(run(session_, nullptr, in.data(), values.data(), in.size(), out.data(), out.size(), results.data()));
    std::vector<Tensor> owned;
    for (RawValue* value : results) owned.emplace_back(value);
    return owned;
  }

  std::vector<std::string> inputs, outputs;

 private:
  std::vector<std::string> names(int count_at, int name_at) const {
    Allocator* allocator = nullptr;
    check(entry<Status*(Allocator**)>(78)(&allocator));
    size_t count = 0;
    check(entry<Status*(const RawSession*, size_t*)>(count_at)(session_, &count));
    std::vector<std::string> result;
    for (size_t at = 0; at < count; at++) {
      char* name = nullptr;
      check(entry<Status*(const RawSession*, size_t, Allocator*, char**)>(name_at)(session_, at, allocator, &name));
      result.emplace_back(name);
      check(entry<Status*(Allocator*, void*)>(76)(allocator, name));
    }
    return result;
  }

  RawSession* session_ = nullptr;
};

}  // namespace ort

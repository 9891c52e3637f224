// What we use of the C interface of ONNX Runtime: entries of a table of functions that only grows. A position and a
// signature are all that is needed of each, so that no header of ONNX Runtime is.
#pragma once
#include <cstddef>
#include <cstdint>

namespace onward {

struct Status;
struct Value;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct OpDomain;
struct TensorInfo;
using Api = void* const;  // the table: one pointer after another

constexpr uint32_t kApiVersion = 24;  // the oldest that has all that is used here

struct ApiBase {
  Api*(*get_api)(uint32_t version);
  const char* (*get_version)();
};

enum ElementType : int { kUndefined = 0, kFloat = 1, kInt64 = 7 };
enum Presence : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

template <class Signature, int position>
struct Entry {
  static Signature* of(Api* api) { return reinterpret_cast<Signature*>(api[position]); }
};

using CreateStatus = Entry<Status*(int code, const char* message), 0>;
using CreateDomain = Entry<Status*(const char* name, OpDomain** domain), 26>;
using AddToDomain = Entry<Status*(OpDomain*, const struct CustomOp*), 27>;
using AddDomain = Entry<Status*(SessionOptions*, OpDomain*), 28>;
using TensorData = Entry<Status*(Value*, void** data), 51>;
using DimensionCount = Entry<Status*(const TensorInfo*, size_t* count), 61>;
using Dimensions = Entry<Status*(const TensorInfo*, int64_t* sizes, size_t count), 62>;
using InfoOfTensor = Entry<Status*(const Value*, TensorInfo** info), 65>;
using FloatAttribute = Entry<Status*(const KernelInfo*, const char* name, float* value), 85>;
using IntAttribute = Entry<Status*(const KernelInfo*, const char* name, int64_t* value), 86>;
using InputCount = Entry<Status*(const KernelContext*, size_t* count), 88>;
using OutputCount = Entry<Status*(const KernelContext*, size_t* count), 89>;
using Input = Entry<Status*(const KernelContext*, size_t index, const Value** value), 90>;
using Output = Entry<Status*(KernelContext*, size_t index, const int64_t* sizes, size_t count, Value** value), 91>;
using ReleaseStatus = Entry<void(Status*), 93>;
using ReleaseInfo = Entry<void(TensorInfo*), 99>;
using IntsAttribute = Entry<Status*(const KernelInfo*, const char* name, int64_t* values, size_t* count), 163>;
using ParallelFor =
    Entry<Status*(const KernelContext*, void (*function)(void*, size_t), size_t total, size_t batches, void* data), 274>;

// What ONNX Runtime asks of an operator, in its order.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, Api*, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void* kernel, KernelContext*);
  void (*destroy)(void* kernel);
  int (*input_presence)(const CustomOp*, size_t);
  int (*output_presence)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);
  int (*least_inputs)(const CustomOp*);
  int (*same_inputs)(const CustomOp*);
  int (*least_outputs)(const CustomOp*);
  int (*same_outputs)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, Api*, const KernelInfo*, void** kernel);
  Status* (*compute_v2)(void* kernel, KernelContext*);
  Status* (*infer_shapes)(const CustomOp*, void*);
  int (*first_version)(const CustomOp*);
  int (*last_version)(const CustomOp*);
  size_t (*may_overwrite)(int** inputs, int** outputs);
  void (*release_may_overwrite)(int*, int*);
  size_t (*aliases)(int** inputs, int** outputs);
  void (*release_aliases)(int*, int*);
};

}  // namespace onward

// The operator in ONNX Runtime: session_options.register_custom_ops_library(LIBRARY).
//
// ONNX Runtime's packages for Python come without its C header. What is used of it is declared here: functions by their
// places in its table, to which every release only adds behind, and the first fields of its description of an operator.
#include <cstddef>
#include <cstdint>
#include <new>

#include "lightnl.h"

namespace {

struct Api {
  void* functions[100];
};

struct ApiBase {
  const Api* (*get)(std::uint32_t version);
  const char* (*version)();
};

using Status = void*;  // null, or what went wrong

// A function of the table, which returns a status.
template <int PLACE, class... Arguments>
Status call(const Api* api, Arguments... arguments) {
  return reinterpret_cast<Status (*)(Arguments...)>(api->functions[PLACE])(arguments...);
}

constexpr int CREATE_STATUS = 0, CREATE_DOMAIN = 26, ADD_TO_DOMAIN = 27, ADD_DOMAIN = 28, TENSOR_DATA = 51,
              DIMENSION_COUNT = 61, DIMENSIONS = 62, ELEMENT_COUNT = 64, SHAPE = 65, FLOAT_ATTRIBUTE = 85,
              INTEGER_ATTRIBUTE = 86, INPUT = 90, OUTPUT = 91, RELEASE_SHAPE = 99;
constexpr std::uint32_t API = 16;  // the first with operators that return a status
constexpr int FLOATS = 1, REQUIRED = 0, OPTIONAL = 1, FAIL = 1, DEFAULT_MEMORY = 0;

struct Operator {
  std::uint32_t version;
  void* (*create_before_16)(const Operator*, const Api*, const void* info);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);
  int (*input_type)(const Operator*, std::size_t);
  std::size_t (*inputs)(const Operator*);
  int (*output_type)(const Operator*, std::size_t);
  std::size_t (*outputs)(const Operator*);
  void (*compute_before_16)(void* kernel, void* context);
  void (*destroy)(void* kernel);
  int (*input_kind)(const Operator*, std::size_t);
  int (*output_kind)(const Operator*, std::size_t);
  int (*input_memory)(const Operator*, std::size_t);
  void* variadic[4];
  Status (*create)(const Operator*, const Api*, const void* info, void** kernel);
  Status (*compute)(void* kernel, void* context);
  void* later_versions[32];
};

struct Kernel {
  const Api* api;
  std::int64_t height, width, compact, stride;
  float energy_eps;
};

Status failed(const Api* api, const char* message) {
  return reinterpret_cast<Status (*)(int, const char*)>(api->functions[CREATE_STATUS])(FAIL, message);
}

Status create(const Operator*, const Api* api, const void* info, void** kernel) {
  Kernel made = {api, 0, 0, 0, 0, 0};
  if (Status wrong = call<INTEGER_ATTRIBUTE>(api, info, "height", &made.height)) return wrong;
  if (Status wrong = call<INTEGER_ATTRIBUTE>(api, info, "width", &made.width)) return wrong;
  if (Status wrong = call<INTEGER_ATTRIBUTE>(api, info, "compact", &made.compact)) return wrong;
  if (Status wrong = call<INTEGER_ATTRIBUTE>(api, info, "stride", &made.stride)) return wrong;
  if (Status wrong = call<FLOAT_ATTRIBUTE>(api, info, "energy_eps", &made.energy_eps)) return wrong;
  *kernel = new (std::nothrow) Kernel(made);
  return *kernel ? nullptr : failed(api, "LightNL: out of memory");
}

// A tensor that came in: its values and how many they are; of no tensor, null.
struct Tensor {
  float* data = nullptr;
  std::size_t count = 0;
  std::int64_t sizes[4] = {0, 0, 0, 0};  // where there are four
};

Status look_at(const Api* api, void* value, Tensor& tensor) {
  if (!value) return nullptr;
  void* shape = nullptr;
  std::size_t axes = 0;
  if (Status wrong = call<TENSOR_DATA>(api, value, reinterpret_cast<void**>(&tensor.data))) return wrong;
  if (Status wrong = call<SHAPE>(api, value, &shape)) return wrong;
  Status wrong = call<ELEMENT_COUNT>(api, shape, &tensor.count);
  if (!wrong) wrong = call<DIMENSION_COUNT>(api, shape, &axes);
  if (!wrong && axes == 4) wrong = call<DIMENSIONS>(api, shape, &tensor.sizes[0], axes);
  reinterpret_cast<void (*)(void*)>(api->functions[RELEASE_SHAPE])(shape);
  return wrong;
}

Status compute(void* kernel, void* context) {
  const auto& [api, height, width, compact, stride, energy_eps] = *static_cast<Kernel*>(kernel);
  Tensor tensors[4];  // x (N, H, W, C), taps (9, C), bias (C), and a shortcut (N, H, W, C) or none
  for (std::size_t i = 0; i < 4; ++i) {
    void* value = nullptr;
    if (Status wrong = call<INPUT>(api, context, i, &value)) return wrong;
    if (Status wrong = look_at(api, value, tensors[i])) return wrong;
  }
  const auto& [x, taps, bias, shortcut] = tensors;
  const autonl::Map map = {height, width, x.sizes[3], compact, stride, energy_eps};
  if (const char* wrong = autonl::problem(map, x.sizes[1], x.sizes[2], taps.count, bias.count)) return failed(api, wrong);
  if (shortcut.data && shortcut.count != x.count) return failed(api, "LightNL: the shortcut is not like x");
  void* out = nullptr;
  float* z = nullptr;
  if (Status wrong = call<OUTPUT>(api, context, std::size_t(0), &x.sizes[0], std::size_t(4), &out)) return wrong;
  if (Status wrong = call<TENSOR_DATA>(api, out, reinterpret_cast<void**>(&z))) return wrong;
  try {
    const std::size_t image = x.sizes[1] * x.sizes[2] * x.sizes[3];
    for (std::size_t start = 0; start < x.count; start += image)
      autonl::lightnl(
          x.data + start, taps.data, bias.data, shortcut.data ? shortcut.data + start : nullptr, z + start, map);
  } catch (const std::bad_alloc&) {
    return failed(api, "LightNL: out of memory");
  }
  return nullptr;
}

const Operator LIGHTNL = {
    API,
    nullptr,
    [](const Operator*) { return "LightNL"; },
    [](const Operator*) -> const char* { return nullptr; },  // the CPU
    [](const Operator*, std::size_t) { return FLOATS; },
    [](const Operator*) { return std::size_t(4); },
    [](const Operator*, std::size_t) { return FLOATS; },
    [](const Operator*) { return std::size_t(1); },
    nullptr,
    [](void* kernel) { delete static_cast<Kernel*>(kernel); },
    [](const Operator*, std::size_t input) { return input == 3 ? OPTIONAL : REQUIRED; },
    [](const Operator*, std::size_t) { return REQUIRED; },
    [](const Operator*, std::size_t) { return DEFAULT_MEMORY; },
    {},
    create,
    compute,
    {},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) Status RegisterCustomOps(void* options, const ApiBase* base) {
  const Api* api = base->get(API);
  if (!api) return failed(base->get(1), "LightNL: needs ONNX Runtime 1.16 or newer");
  void* domain = nullptr;  // lives as long as the process: sessions may
  if (Status wrong = call<CREATE_DOMAIN>(api, "autonl", &domain)) return wrong;
  if (Status wrong = call<ADD_TO_DOMAIN>(api, domain, &LIGHTNL)) return wrong;
  return call<ADD_DOMAIN>(api, options, domain);
}

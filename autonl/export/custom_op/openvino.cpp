// The operator in OpenVINO, an extension: core.add_extension(LIBRARY).
#include <memory>
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "lightnl.h"

namespace {

// Inputs: x (N, H, W, C), taps (9, C), bias (C), and a shortcut (N, H, W, C) where there is one.
class LightNL : public ov::op::Op {
 public:
  OPENVINO_OP("LightNL", "autonl");

  LightNL() = default;
  LightNL(const ov::OutputVector& inputs, const LightNL& like)
      : Op(inputs), height(like.height), width(like.width), compact(like.compact), stride(like.stride),
        energy_eps(like.energy_eps) {
    constructor_validate_and_infer_types();
  }

  void validate_and_infer_types() override {
    const ov::PartialShape& shape = get_input_partial_shape(0);
    const ov::PartialShape allowed = {-1, height, width, -1};
    NODE_VALIDATION_CHECK(this, shape.compatible(allowed), "LightNL: x is ", shape, ", allowed: ", allowed);
    set_output_type(0, get_input_element_type(0), shape);
  }

  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    return std::make_shared<LightNL>(inputs, *this);
  }

  bool visit_attributes(ov::AttributeVisitor& visitor) override {
    visitor.on_attribute("height", height);
    visitor.on_attribute("width", width);
    visitor.on_attribute("compact", compact);
    visitor.on_attribute("stride", stride);
    visitor.on_attribute("energy_eps", energy_eps);
    return true;
  }

  bool has_evaluate() const override { return get_input_element_type(0) == ov::element::f32; }

  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    const ov::Shape shape = inputs[0].get_shape();
    const autonl::Map map = {height, width, std::ptrdiff_t(shape[3]), compact, stride, energy_eps};
    const char* wrong = autonl::problem(map, shape[1], shape[2], inputs[1].get_size(), inputs[2].get_size());
    OPENVINO_ASSERT(!wrong, wrong);
    OPENVINO_ASSERT(inputs.size() < 4 || inputs[3].get_shape() == shape, "LightNL: the shortcut is not like x");
    outputs[0].set_shape(shape);
    const std::size_t image = shape[1] * shape[2] * shape[3];
    for (std::size_t start = 0; start < shape[0] * image; start += image)
      autonl::lightnl(
          inputs[0].data<float>() + start, inputs[1].data<float>(), inputs[2].data<float>(),
          inputs.size() > 3 ? inputs[3].data<float>() + start : nullptr, outputs[0].data<float>() + start, map);
    return true;
  }

 private:
  std::int64_t height = 0, width = 0, compact = 0, stride = 0;
  float energy_eps = 0;
};

}  // namespace

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<LightNL>>()}));

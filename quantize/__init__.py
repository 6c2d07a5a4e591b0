"""From a recipe to a strongly typed ONNX graph and an engine that is proven to run INT8."""

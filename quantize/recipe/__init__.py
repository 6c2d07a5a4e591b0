"""The YAML recipe, and the plan that it resolves to on a model."""

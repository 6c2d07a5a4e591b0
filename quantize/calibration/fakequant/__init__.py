"""ModelOpt's quantizers in a model, and the arithmetic that replaces theirs."""

"""A finished run as a folder that needs no qdqbench: engine, graph, tokenizer, scripts that run them."""

"""Explicit Q/DQ INT8 for BERT-class encoders."""

"""Texts to answers with NumPy, `tokenizers` and one runtime alone; `deploy/` has a copy of these modules."""

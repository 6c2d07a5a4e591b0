"""Encoder families as data: what each calls its modules, and the few ways in which its models differ."""

"""Describes the family of a model of any type: what each module is, by class, position and data flow."""

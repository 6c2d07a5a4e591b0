"""Detection of the layout of any model: the role of each module by class, position and data flow."""

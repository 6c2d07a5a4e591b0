"""What is wrong with INT8 in files of any origin: readers, and rules over what they found."""

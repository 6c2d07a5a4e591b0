"""Diagnosis of INT8 in files of any origin: readers of the files, and rules that find faults in them."""

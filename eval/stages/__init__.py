"""The stages of a run, and what each depends on."""

"""A run on a machine where only trtexec is: what to run there, and its times as a bench."""
